"""Save sets that a person would try by hand, in the planner's own terms.

They stand among the candidates of every plan with their predicted cost, and the leanest of them is
compiled before a budget is refused. Blocks are those of `blocks`; a `jax.checkpoint` that a person
places elsewhere may compile to a few per cent less.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jrc._jaxpr import Program, facts_of
from jrc.remat._planner.blocks import block_borders, crossing_values
from jrc.remat._planner.cost_graph import CostGraph
from jrc.remat._planner.solver import InnerOption, ParetoPoint, solve


def hand_made_points(
    program: Program,
    graph: CostGraph,
    options: Mapping[int, Sequence[InnerOption]] | None,
) -> dict[str, list[ParetoPoint]]:
    """Return, by name, what recomputing by hand would cost.

    Args:
        program: The program.
        graph: Its cost graph.
        options: By position, the options of constructs outside of all regions.

    Returns:
        Under each name a front: one point, or several where a loop can be treated in several ways.
    """
    return {
        name: solve(graph, options, saved=values)
        for name, values in _save_sets(program, graph).items()
    }


def _save_sets(program: Program, graph: CostGraph) -> dict[str, frozenset[int]]:
    products = _products(program, graph, batched=True)
    sets = {
        "everything recomputed": frozenset(),
        "products saved": products,
        "products without batch dimensions saved": _products(program, graph, batched=False),
        "every mark recomputed": _at_borders(graph, _mark_borders(program, graph)),
        "marks saved": _marked(program, graph),
    }
    borders = block_borders(program, graph)
    sets["every block recomputed"] = _at_borders(graph, borders)
    stride = round(math.sqrt(len(borders))) if borders else 1
    if stride > 1:
        sets[f"every {stride} blocks recomputed"] = _at_borders(
            graph, borders[stride - 1 :: stride]
        )
    unique: dict[frozenset[int], str] = {}
    for name, values in sets.items():
        if values or name == "everything recomputed":
            unique.setdefault(values, name)
    return {name: values for values, name in unique.items()}


def _at_borders(graph: CostGraph, borders: Sequence[int]) -> frozenset[int]:
    return frozenset().union(*(crossing_values(graph, k) for k in borders))


def _products(program: Program, graph: CostGraph, batched: bool) -> frozenset[int]:
    """The results of matrix products and convolutions, or of those without batch dimensions."""
    return frozenset(
        v
        for node in graph.nodes
        if node.position >= 0 and _is_product(program.eqns[program.steps[node.position]], batched)
        for v in node.makes
    )


def _is_product(eqn: Any, batched: bool) -> bool:
    numbers = eqn.params.get("dimension_numbers")
    if not facts_of(eqn).is_contraction:
        return False
    return batched or eqn.primitive.name != "dot_general" or not any(numbers[1])


def _marked(program: Program, graph: CostGraph) -> frozenset[int]:
    """The values that carry a mark."""
    names = {
        (program.producer[var], list(program.eqns[program.producer[var]].outvars).index(var))
        for var in program.names
        if program.producer[var] >= 0
    }
    places = [(program.steps[p] if p >= 0 else p, i) for p, i in graph.names]
    return frozenset(v for v, place in enumerate(places) if place in names)


def _mark_borders(program: Program, graph: CostGraph) -> list[int]:
    """The places behind marked values."""
    marked = _marked(program, graph)
    return [k + 1 for k, node in enumerate(graph.nodes) if marked.intersection(node.makes)]
