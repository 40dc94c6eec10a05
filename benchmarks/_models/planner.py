"""Plans of one model, of the fewest FLOPs, at many budgets, each measured on its own."""

import time
from collections.abc import Callable
from typing import Any

import jax

import jrc
from benchmarks._lib.gradient import Cache, counts, measure
from benchmarks._models.model import Model
from benchmarks._private import PlanSearch

COMPILATIONS = 5
"""How many programs a search may compile here; `jrc.plan` takes 6 if not told otherwise."""


class Planner:
    """A model with its plans; the model is traced once, and no candidate is compiled twice."""

    def __init__(self, model: Model, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.search = PlanSearch(model.fn, model.args, model.has_aux, COMPILATIONS)
        self._known: dict[str, dict[str, Any]] = {}

    def plan(self, budget: int | float) -> Any:
        """Return the plan of `jrc.plan` with `minimize="flops"`."""
        return self.search.plan(budget)

    def measure(self, fn: Callable[..., Any]) -> dict[str, Any]:
        """Return all figures of the gradient program of a function like the model's."""
        return measure(fn, self.model.args, self.model.has_aux, self.cache)

    def counts(self, fn: Callable[..., Any]) -> dict[str, Any]:
        """Return what is counted in the traced gradient program."""
        return counts(fn, self.model.args, self.model.has_aux)

    def within(self, budget: int) -> dict[str, Any]:
        """Return the figures of the plan for a budget, or the least peak if there is none."""
        try:
            plan = self.plan(budget)
        except jrc.BudgetError as error:
            return {"budget": budget, "least": error.least_bytes}
        key = plan.to_json()
        if key not in self._known:  # two budgets may have the same plan
            self._known[key] = self.measure(plan.apply(self.model.fn))
        return self._known[key] | {
            "budget": budget,
            "predicted_peak": plan.predicted.peak_bytes,
            "predicted_flops": plan.predicted.flops,
            "verified_peak": plan.verified.peak_bytes,
            "compilations": plan.compilations,
        }

    def seconds(self, baseline_peak: int, least_peak: int) -> float:
        """Time tracing and solving without compiling, from cold caches, at a third of the range."""
        budget = least_peak + (baseline_peak - least_peak) // 3
        model = self.model
        jax.clear_caches()
        began = time.perf_counter()
        options = {"has_aux": model.has_aux, "minimize": "flops", "verify": False}
        jrc.plan(model.fn, *model.args, budget=budget, **options)
        return time.perf_counter() - began
