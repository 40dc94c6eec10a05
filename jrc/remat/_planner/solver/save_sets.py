"""The values that a policy of `jax.checkpoint` saves: products, and values that carry a mark."""

from collections.abc import Mapping
from typing import Any

from jrc._jaxpr import Program, facts_of, has_batch_axes
from jrc.remat._planner.costs.cost_graph import CostGraph

NOTHING_SAVED = "nothing"
"""What a bare `jax.checkpoint` saves of its inside."""

IN_SEGMENTS = "nothing, in segments"
"""The same around each step of a loop, and around segments of its steps."""

MARKS = "marks"
"""What the values are called that carry a mark."""


def policy_sets(program: Program, graph: CostGraph) -> dict[str, frozenset[int]]:
    """Return what policies of JAX save of a program, by what it is called; only what is there."""
    sets = {
        "products": _products(program, graph, batched=True),
        "products without batch dimensions": _products(program, graph, batched=False),
        MARKS: marked_values(program, graph),
    }
    return {name: values for name, values in sets.items() if values}


def distinct(sets: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Return the sets without those that equal an earlier one.

    >>> distinct({"products": frozenset({1}), "marks": frozenset({1})})
    {'products': frozenset({1})}
    """
    first = {values: name for name, values in reversed(list(sets.items()))}
    return {name: values for name, values in sets.items() if first[values] == name}


def _products(program: Program, graph: CostGraph, batched: bool) -> frozenset[int]:
    """The results of matrix products and convolutions, or of those without batch dimensions."""
    return frozenset(
        v
        for node in graph.nodes
        if node.position >= 0 and _is_product(program.eqns[program.steps[node.position]], batched)
        for v in node.makes
    )


def _is_product(eqn: Any, batched: bool) -> bool:
    return facts_of(eqn).is_contraction and (batched or not has_batch_axes(eqn))


def marked_values(program: Program, graph: CostGraph) -> frozenset[int]:
    """Return the values that carry a mark."""
    names = {
        (program.producer[var], list(program.eqns[program.producer[var]].outvars).index(var))
        for var in program.names
        if program.producer[var] >= 0
    }
    places = [(program.steps[p] if p >= 0 else p, i) for p, i in graph.names]
    return frozenset(v for v, place in enumerate(places) if place in names)
