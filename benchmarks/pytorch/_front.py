"""jrc's side of `peers.py`: its front by saved bytes and products, its plans, and ways by hand.

A plan is asked for by its peak. What stands at equal saved bytes is the same solver on the same
program, with saved bytes and products alone to weigh, as PyTorch's does; plans weigh what XLA
needs and every operator, so that their saved bytes lie above that front.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks._lib.gradient import PRODUCTS
from benchmarks.memory.plan import Planner
from jrc._jaxpr import primitive_name
from jrc._tree import is_floating
from jrc.remat._planning.cuts import choice_of
from jrc.remat._planning.flow import moved
from jrc.remat._planning.solve import Point, solve
from jrc.remat._planning.weigh import graph_of

Row = dict[str, Any]


class Front:
    """The cheapest choices by saved bytes; each that is set beside another way is traced, once."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.graph, self.points = _by_saved_bytes(planner.candidates.program)
        self.known: dict[int, Row] = {}

    def within(self, saved: int) -> Row:
        """The cheapest that saves no more; the leanest of a GPT saves nothing at all."""
        fitting = [i for i, point in enumerate(self.points) if point.saved <= saved]
        return self.at(min(fitting, key=lambda i: self.points[i].flops))

    def at(self, i: int) -> Row:
        if i not in self.known:
            chosen = self.planner.as_chosen(choice_of(self.graph, self.points[i]))
            self.known[i] = counted(self.planner, chosen)
        return self.known[i]

    def curve(self) -> list[Row]:
        """All choices, as the solver counts them."""
        nothing = counted(self.planner, self.planner.model.fn)["product_flops"]
        return [
            {"saved": point.saved, "product_flops": nothing + point.flops} for point in self.points
        ]


def counted(planner: Planner, fn: Any) -> Row:
    """Saved bytes and product FLOPs of a function's gradient program, as it is written."""
    found = planner.counts(fn)
    return {"saved": found["saved"], "product_flops": found["product_flops"]}


def by_hand(planner: Planner) -> Iterator[tuple[str, Row]]:
    """`jax.checkpoint` in the ways of `plan_references.py`."""
    for name, fn in planner.model.references.items():
        yield name, counted(planner, fn)


def planned(planner: Planner, budget: float) -> Row:
    """What `jrc.plan` returns for a fraction, compiled and within its budget."""
    plan = planner.plan(budget)
    return {
        "budget": budget,
        "peak": plan.verified.peak_bytes,
        **counted(planner, plan.apply(planner.model.fn)),
    }


def _by_saved_bytes(program: Any) -> tuple[Any, list[Point]]:
    """The graph of the program, and its front of choices by saved bytes and product FLOPs alone."""
    moving = [v for v in program.jaxpr.invars if is_floating(v.aval)]
    graph = graph_of(program, moved(program, moving, program.jaxpr.outvars[:1]))
    nothing = (0,) * len(graph.sizes)
    nodes = tuple(
        dataclasses.replace(
            node, back=0, operands=(), flops=node.flops * _is_product(program, node)
        )
        for node in graph.nodes
    )
    weighed = dataclasses.replace(graph, nodes=nodes, remade=nothing, passing=nothing)
    return graph, solve(weighed, limit=2000, tiny=0.0)


def _is_product(program: Any, node: Any) -> bool:
    return primitive_name(program.eqns[node.position]) in PRODUCTS
