"""Save sets of the fewest FLOPs, as further options where costs are modelled seconds.

On a CPU modelled seconds of passes over data are off by more than save sets differ in. A DenseNet
takes 14 % less with a save set that the model ranks behind others, and that a count of FLOPs finds.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jrc._jaxpr import Program
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.costs.cost_unit import TimeUnit
from jrc.remat._planner.plan.decision import Region
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.decisions import saved_values
from jrc.remat._planner.solver.option import Option, spread_options
from jrc.remat._planner.solver.option_of_set import left_to_jax, option_of_set
from jrc.remat._planner.solver.solver import TooMuchWork, solve

Options = Mapping[int, Sequence[Option]]

# Few options of this front are taken.
_COARSE = dataclasses.replace(SETTINGS, labels=SETTINGS.labels // 8, states=SETTINGS.states // 8)


def with_fewest_flops(
    program: Program, graph: CostGraph, options: Options, front: Sequence[Option], unit: TimeUnit
) -> list[Option]:
    """Return a front with a few options more, of the front by FLOPs, the leanest first.

    Args:
        program: The program.
        graph: Its cost graph.
        options: By position, the options of constructs in it; their costs stay seconds.
        front: Its front by seconds.
        unit: The unit of its costs.
    """
    nodes = tuple(_in_flops(node, program, unit) for node in graph.nodes)
    counted = dataclasses.replace(graph, nodes=nodes, saving_costs=())
    try:
        by_flops = solve(counted, options, settings=_COARSE)
    except TooMuchWork:
        return list(front)
    found = spread_options(by_flops, 3 * counted.cost, SETTINGS.options_of_flops)
    known = {(each.peak, each.cost) for each in front}
    more = [each for option in found if (each := _in_seconds(graph, option, options)) is not None]
    more = [each for each in more if (each.peak, each.cost) not in known]
    return sorted([*front, *more], key=lambda each: each.peak)


def _in_flops(node: CostNode, program: Program, unit: TimeUnit) -> CostNode:
    """The node with its FLOPs as cost, as seconds of products."""
    flops = program.flops[program.steps[node.position]]
    return dataclasses.replace(node, cost=unit.of_seconds(flops / unit.rates.products))


def _in_seconds(graph: CostGraph, option: Option, options: Options) -> Option | None:
    """The option with its cost in the unit of the graph."""
    stages = {each.equations: each for each in option.stages.stages if not isinstance(each, Region)}
    outside = {k for equations in stages for k in equations}
    constructs = (node for node in graph.nodes if node.has_inside and node.position in outside)
    left = {node.position: left_to_jax(node) for node in constructs}
    chosen = {
        k: each
        for k, some in options.items()
        for each in reversed(some)
        if each.decision == stages.get((k,))
    }
    found = option_of_set(graph, saved_values(graph, option.stages), left | chosen)
    if found is None:
        return None
    return dataclasses.replace(option, cost=found.cost, family="fewest FLOPs")
