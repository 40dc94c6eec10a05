"""A program, or parts of one, under `jax.checkpoint`: a manual option."""

import dataclasses

from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.solver.decisions import decision_of_regions, recomputed_cost, saving_cost
from jrc.remat._planner.solver.option import Option, made
from jrc.remat._planner.solver.option_of_set import option_of_set


def under_checkpoint(
    graph: CostGraph, values: frozenset[int], name: str, times: int = 1
) -> Option | None:
    """Return a whole program under one `jax.checkpoint`; `None` where nothing would be recomputed.

    Args:
        graph: The cost graph.
        values: The variables that are saved by name; without any the `jax.checkpoint` is bare.
        name: What the option is called.
        times: How often the program runs: the steps of a loop, whose carries are saved as well.
    """
    saved = graph.carries | values
    option = option_of_set(graph, saved, times=times)
    if option is None:
        return None
    whole = [range(len(graph.nodes))]
    decision = decision_of_regions(graph, saved, {}, whole, by_name=bool(values))
    recomputed = recomputed_cost(graph, decision)
    if not recomputed:
        return None
    cost = (recomputed + saving_cost(graph, decision, saved, ())) * times
    return dataclasses.replace(option, cost=cost, make_decision=made(decision), name=name)
