"""What `jrc.plan` reaches: nine models, twenty budgets each, beside recomputation by hand.

    python benchmarks/plan.py [--toy] [--models gpt,unet] [--cache runs/plan] \
        [--out benchmarks/results/plan.json]
    python benchmarks/plan.py --rss --out benchmarks/results/plan.json
    python benchmarks/plan.py --seconds --out benchmarks/results/plan.json

Of each model: nothing re-run, five ways by hand, and plans at twenty budgets between the least
peak and that of nothing re-run. Each plan's gradient program is compiled here once more, and what
XLA says of it decides. Then a plan at the peak of each way by hand, at half and a quarter of the
temporaries.

Nothing is run but with `--toy` (where gradients are compared) and `--rss` (which runs the two
largest models in processes of their own). `--seconds` takes the time of planning anew, to be done
while nothing else runs. `--out` is read first: other models in it stay. With
`--cache` nothing is compiled twice, not in later runs either. The exit status is 1 if a promise is
broken: a budget exceeded, FLOPs that rise with the budget, more than five compilations, a budget
that should have been refused, a value that is not truly kept, a way by hand that costs less.
"""

import argparse
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress

import jrc
from benchmarks._lib import platform as machine
from benchmarks._lib.gradient import UNFUSED, Cache, counts, measure
from benchmarks._lib.report import opened
from benchmarks._models.catalogue import MODELS, Model, drawn
from benchmarks.memory import _resident as plan_rss
from benchmarks.memory._plan_tables import dearer, show
from jrc.remat._budget import checked_budget
from jrc.remat._candidates import Candidates
from jrc.remat._memory import memory_needed
from jrc.remat._planner import choose
from jrc.remat._planning.ladder import Rung

BUDGETS, TOY_BUDGETS = 20, 5
COMPILATIONS = 5
SHARES = {"half": 2, "quarter": 4}
# How far the FLOPs of a plan may be from what it says, for what transposition adds.
SLACK = 1.001


class Planner:
    """Plans for one model, each measured on its own."""

    def __init__(self, model: Model, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.memory: dict[int, Any] = {}
        self.known: dict[str, dict[str, Any]] = {}

    def measure(self, fn: Callable[..., Any]) -> dict[str, Any]:
        return measure(fn, self.model.args, self.model.has_aux, self.cache)

    def measure_plan(self, plan: Any, how: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Two budgets may have the same plan, which is traced once."""
        key = f"{how.__name__} {plan.to_json()}"
        if key not in self.known:
            self.known[key] = how(plan.apply(self.model.fn))
        return self.known[key]

    def plan(self, budget: int | float, verify: bool = True) -> Any:
        """What `jrc.plan` returns; the model is traced, and each candidate compiled, once."""
        compiled = self.compiled if verify else None
        return choose(self.candidates, checked_budget(budget, "plan"), compiled, "plan")

    @functools.cached_property
    def candidates(self) -> Candidates:
        model = self.model
        return Candidates.of(
            model.fn, model.args, 0, model.has_aux, "plan", compilations=COMPILATIONS
        )

    def compiled(self, rung: Any) -> Any:
        if id(rung) not in self.memory:
            model = self.model
            fn = self.candidates.applied(rung, model.fn)
            program = jax.value_and_grad(fn, has_aux=model.has_aux)
            self.memory[id(rung)] = memory_needed(jax.jit(program).lower(*model.args))
        return self.memory[id(rung)]

    def within(self, budget: int) -> dict[str, Any]:
        """A plan that fits, compiled anew, or what the refusal says."""
        try:
            plan = self.plan(budget)
        except jrc.BudgetError as error:
            return {"budget": budget, "least": error.least_bytes}
        return self.measure_plan(plan, self.measure) | {
            "budget": budget,
            "predicted_peak": plan.predicted.peak_bytes,
            "predicted_flops": plan.predicted.flops,
            "verified_peak": plan.verified.peak_bytes,
            "compilations": plan.compilations,
        }

    def seconds(self, found: Mapping[str, Any]) -> float:
        """Tracing and solving without compiling, from cold caches, for a third of what there is."""
        model, least = self.model, found["least"]
        budget = least + (found["baseline"]["peak"] - least) // 3
        jax.clear_caches()
        began = time.perf_counter()
        jrc.plan(model.fn, *model.args, budget=budget, has_aux=model.has_aux, verify=False)
        return time.perf_counter() - began

    def as_chosen(self, choice: Any) -> Callable[..., Any]:
        """The model's function with a choice that is on no row of plans."""
        return self.candidates.applied(Rung(choice, 0, 0, 0), self.model.fn)

    def counts(self, fn: Callable[..., Any]) -> dict[str, Any]:
        return counts(fn, self.model.args, self.model.has_aux)


def references(planner: Planner) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, fn in planner.model.references.items():
        yield name, planner.measure(fn)


def study(
    planner: Planner, found: dict[str, Any], budgets: int, step: Callable[[str], None]
) -> None:
    """Everything about plans of one model, into `found`, which holds baseline and references."""
    base = found["baseline"]
    found["least"] = least = planner.plan(0.0).verified.peak_bytes
    step("budgets")
    span = base["peak"] - least
    found["budgets"] = []
    for i in range(budgets):
        found["budgets"].append(planner.within(least + span * i // (budgets - 1)))
        step(f"budget {i + 1} of {budgets}")
    found["refused"] = planner.within(int(0.9 * least))
    found["beside"] = {}
    for name, row in found["references"].items():
        found["beside"][name] = planner.within(row["peak"])
        step(f"at the peak of: {name}")
    held = base["peak"] - base["temporaries"]
    for name, parts in SHARES.items():
        found["beside"][name] = planner.within(held + base["temporaries"] // parts)
    found["seconds"] = planner.seconds(found)
    step("seconds")


def broken(name: str, found: Mapping[str, Any]) -> list[str]:
    """What was promised and is not so."""
    said = []
    rows = [*found["budgets"], *(row for row in found["beside"].values() if "peak" in row)]
    for row in rows:
        at = f"{name}: budget {row['budget']:,}"
        if "peak" not in row:
            said.append(f"{at} refused; the least is {row['least']:,}")
            continue
        if row["peak"] > row["budget"]:
            said.append(f"{at} exceeded: {row['peak']:,}")
        if row["compilations"] > COMPILATIONS:
            said.append(f"{at}: {row['compilations']} compilations")
        if row["flops"] > SLACK * row["predicted_flops"]:
            said.append(f"{at}: {row['flops']:,} FLOPs, planned {row['predicted_flops']:,}")
        if row["compiled_products"] > row["products"]:
            said.append(f"{at}: {row['compiled_products']} products for {row['products']}")
    ladder = sorted((row for row in rows if "peak" in row), key=lambda row: row["budget"])
    for small, large in zip(ladder, ladder[1:], strict=False):
        if large["flops"] > small["flops"]:
            said.append(f"{name}: {large['budget']:,} costs more than {small['budget']:,}")
    said += [f"{name}: `{way}` costs less than the plan within its peak" for way in dearer(found)]
    refused = found["refused"]
    if "peak" in refused or refused["least"] <= refused["budget"]:
        said.append(f"{name}: {refused['budget']:,} is not refused, or not with the least bytes")
    return said


def gradients_differ(planner: Planner, budget: int) -> float:
    """The largest difference to the plain gradients, relative to a leaf's largest entry."""
    model, args = planner.model, drawn(planner.model.args)
    grads = [
        jax.jit(jax.grad(fn, has_aux=model.has_aux), compiler_options=UNFUSED)(*args)
        for fn in (model.fn, planner.plan(budget).apply(model.fn))
    ]
    plain, lean = (found[0] if model.has_aux else found for found in grads)
    errors = jax.tree.map(
        lambda x, y: jnp.max(jnp.abs(x - y)) / jnp.maximum(jnp.max(jnp.abs(x)), 1e-30), plain, lean
    )
    return float(jnp.max(jnp.stack(jax.tree.leaves(errors))))


def one(name: str, options: argparse.Namespace, cache: Cache, progress: Progress) -> dict[str, Any]:
    model = MODELS[name](options.toy)
    planner = Planner(model, cache)
    budgets = TOY_BUDGETS if options.toy else BUDGETS
    work = 1 + len(model.references)
    work += 0 if options.references else budgets + work + 1
    task = progress.add_task(model.title, total=work)

    def step(what: str) -> None:
        progress.update(task, advance=1, description=f"{model.title}: {what}")

    found = {"title": model.title, "scanned": model.scanned, "references": {}}
    found["baseline"] = planner.measure(model.fn)
    step("nothing re-run")
    for reference, row in references(planner):
        found["references"][reference] = row
        step(reference)
    if options.references:
        return found
    study(planner, found, budgets, step)
    if options.toy:
        budget = (found["least"] + found["baseline"]["peak"]) // 2
        found["gradients_differ"] = gradients_differ(planner, budget)
    return found


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--toy", action="store_true", help="tiny models, to see that it runs")
    add("--models", default=",".join(MODELS), help="some of: %(default)s")
    add("--references", action="store_true", help="only nothing re-run, and the ways by hand")
    add("--rss", action="store_true", help="real memory of the two largest models in --out")
    add("--seconds", action="store_true", help="the time of planning the models in --out")
    add("--quick", action="store_true", help="no optimised machine code: the bytes are the same")
    machine.add_platform(parser)
    add("--cache", type=pathlib.Path, help="folder for what XLA says of programs")
    add("--out", type=pathlib.Path, help="JSON file to read and write")
    options = parser.parse_args(argv)
    options.quick |= options.toy
    options.models = options.models.split(",")
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"--models: some of {', '.join(MODELS)}; got {', '.join(sorted(unknown))}")
    if (options.rss or options.seconds) and not (options.out and options.out.exists()):
        parser.error("--rss, --seconds: need the results of a run; name its file with --out")
    return options


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = arguments(argv)
    machine.use(options.platform)
    if options.cache:
        # What jrc.plan itself compiles.
        jax.config.update("jax_compilation_cache_dir", str((options.cache / "xla").resolve()))
    console = Console()
    old = opened(options.out, "plan.py", "toy", "models")
    report = machine.device() | {"toy": options.toy}
    report["models"] = old.get("models", {})
    said: list[str] = []
    with Progress(console=console) as progress:
        if options.rss:
            report["toy"] = old["toy"]
            task = progress.add_task("real memory", total=None)
            plan_rss.study(report, lambda what: progress.update(task, description=what))
        if options.seconds:
            report["toy"] = old["toy"]
            for name, found in report["models"].items():
                planner = Planner(MODELS[name](old["toy"]), Cache(None))
                found["seconds"] = planner.seconds(found)
        for name in () if options.rss or options.seconds else options.models:
            cache = Cache(options.cache, options.quick)
            report["models"][name] = found = one(name, options, cache, progress)
            # Tiny models are for gradients; their bytes follow no model of large values.
            if "budgets" in found and not options.toy:
                said += broken(name, found)
            if found.get("gradients_differ", 0.0) > 1e-6:
                said.append(f"{name}: gradients differ by {found['gradients_differ']:.1e}")
            _write(options.out, report)
    _write(options.out, report)
    show(console, report)
    for line in said:
        console.print(f"[red]broken:[/red] {line}")
    if said:
        sys.exit(1)
    return report


def _write(path: pathlib.Path | None, report: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
