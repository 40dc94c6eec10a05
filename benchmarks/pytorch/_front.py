"""jrc's side of `benchmarks.pytorch.saved_bytes`: its Pareto front, its plans, and ways by hand.

A plan is asked for by its peak. The front has the cheapest choices by saved bytes and matrix
products alone, which is what PyTorch's solver weighs; it comes from jrc's solver on the same
program. Plans weigh what XLA needs at its peak and every operator, so they lie above that front.
"""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks._models.planner import Planner

Row = dict[str, Any]


class Front:
    """The cheapest choices by saved bytes; each is traced at most once."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.points = planner.search.saved_bytes_front()
        self._known: dict[int, Row] = {}

    def within(self, saved: int) -> Row:
        """Return the cheapest choice that saves no more bytes."""
        fitting = [i for i, point in enumerate(self.points) if point.saved <= saved]
        return self.at(min(fitting, key=lambda i: self.points[i].flops))

    def at(self, i: int) -> Row:
        """Return the figures of a choice, counted in its program."""
        if i not in self._known:
            self._known[i] = counted(self.planner, self.points[i].applied())
        return self._known[i]

    def curve(self) -> list[Row]:
        """Return all choices, as the solver counts them."""
        nothing = counted(self.planner, self.planner.model.fn)["product_flops"]
        return [
            {"saved": point.saved, "product_flops": nothing + point.flops} for point in self.points
        ]


def counted(planner: Planner, fn: Callable[..., Any]) -> Row:
    """Return saved bytes and product FLOPs of a function's traced gradient program."""
    found = planner.counts(fn)
    return {"saved": found["saved"], "product_flops": found["product_flops"]}


def by_hand(planner: Planner) -> Iterator[tuple[str, Row]]:
    """Yield the figures of `jax.checkpoint` in the ways of `benchmarks._models.by_hand`."""
    for name, fn in planner.model.references.items():
        yield name, counted(planner, fn)


def planned(planner: Planner, budget: float) -> Row:
    """Return the figures of the plan for a fraction of the range of peaks."""
    plan = planner.plan(budget)
    return {
        "budget": budget,
        "peak": plan.verified.peak_bytes,
        **counted(planner, plan.apply(planner.model.fn)),
    }
