"""Find the largest batch of models on accelerators that are not there, with and without a plan.

    python -m benchmarks.targets.largest_batch --targets h100,v5e --models gpt2_124m,resnet50 \
        --out benchmarks/results/targets.json --plot benchmarks/results

For each model and target: the baseline, every block under `jax.checkpoint`, JAX's
`dots_with_no_batch_dims_saveable`, MaxText's policies by names, and `jrc.plan`, as
`jrc.largest_batch` finds it. Bytes are those of the target's own compiler for `value_and_grad` of
the loss, of one device; the budget is nine tenths of its memory, less the two float32 moments of
AdamW for each parameter. Examples a second are the batch over the seconds that jrc states for its
program, which has not run; the batch of most of them is one of those that were compiled on the way.
Parameters are float32, the loss computes in bfloat16. On several devices
the examples are split over all of them, and so are the parameters (FSDP), but for the ResNet's.

Nothing is run. Compilations take up to minutes: rows that `--out` has are not measured again, and
each is written as soon as it is there. A target whose compiler is not installed is left out. Where
parameters, gradients and moments alone exceed the memory nothing is compiled.
"""

import argparse
import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._private import (
    bytes_on_device,
    compiled_with_memory,
    flops,
    largest_within,
    predicted_peak,
    predicted_start,
    program_figures,
)
from benchmarks.targets._largest_tables import PLAN, beaten, plot, tables
from benchmarks.targets._models import AXIS, DOTS, FULL, MAXTEXT, MODELS, PLAIN, Model

NAME = "targets.largest_batch"
MOST = 2**14
WAYS = (PLAN, PLAIN, FULL, DOTS, *MAXTEXT)
TOY_BUDGET, TOY_MOST = 40 * 2**20, 8


def measure(run: Run) -> None:
    """Measure each model on each target, way by way."""
    run.report |= platform.machine()
    rows = run.report.setdefault("rows", {})
    for name in run.options.targets:
        target = jrc.target(name)
        try:
            _ = target.devices
        except ImportError as error:
            run.console.print(f"{name} is left out: {error}")
            continue
        for model_name in run.options.models:
            case = Case(MODELS[model_name](run.options.toy), target, run.options.toy)
            row = rows.setdefault(f"{model_name} {target.name}", case.about())
            for way in run.options.ways:
                if way in (PLAN, *case.model.ways) and way not in row["ways"]:
                    run.status(f"{model_name} on {target.name}: {way}")
                    row["ways"] |= case.found(way)
                    row["settings"] = platform.machine() | {"minimize": "time"}
                    run.save()


class Case:
    """A model on a target."""

    def __init__(self, model: Model, target: jrc.Target, toy: bool) -> None:
        self.model, self.target = model, target
        self.mesh = Mesh(np.asarray(target.devices), (AXIS,), axis_types=(AxisType.Auto,))
        self.step = model.step * target.device_count
        self.most = (TOY_MOST if toy else MOST) * target.device_count
        self.params = model.args(self.step, self.mesh)[0]
        leaves = jax.tree.leaves(self.params)
        self.held = 4 * sum(map(bytes_on_device, leaves))
        self.budget = (TOY_BUDGET if toy else target.budget) - self.held // 2

    def about(self) -> dict[str, Any]:
        """Return what the row says before anything is compiled."""
        return {
            "model": self.model.title,
            "target": self.target.name,
            "devices": self.target.device_count,
            "parameters": sum(x.size for x in jax.tree.leaves(self.params)),
            "held": self.held,
            "memory": self.target.budget,
            "step": self.step,
            "ways": {},
        }

    def found(self, way: str) -> dict[str, dict[str, Any]]:
        """Return the largest batch of a way, its peak, FLOPs, seconds and compilations.

        The search for a plan returns that of the baseline too. What cannot fit is not looked
        for.
        """
        if self.held > self.target.budget:
            none = {"batch": 0, "seconds": 0.0, "compilations": 0}
            return {each: none for each in (way, *([PLAIN] if way == PLAN else []))}
        with jax.set_mesh(self.mesh), counted_compilations() as count:
            began = time.perf_counter()
            found = self._planned() if way == PLAN else {way: self._by_hand(way)}
            spent = {"seconds": time.perf_counter() - began, "compilations": len(count)}
        found[way] |= spent
        return found

    def _planned(self) -> dict[str, dict[str, Any]]:
        found = jrc.largest_batch(
            self._args, self.model.loss, self.budget, has_aux=self.model.has_aux,
            multiple_of=self.step, most=self.most, target=self.target,
        )  # fmt: skip
        ways: dict[str, dict[str, Any]] = {PLAIN: {"batch": found.plain, "flops": 1.0}}
        if found.plain:
            ways[PLAIN] |= self._cost(self.model.loss, found.plain)
        if found.plan is None:
            return ways | {PLAN: {"batch": 0}}
        cost = found.plan.verified or found.plan.predicted
        (chosen,) = (each for each in found.plan.candidates if each.is_chosen)
        ways[PLAN] = {
            "batch": found.recomputed,
            "peak": cost.peak_bytes,
            "flops": cost.flops_ratio,
            "per_second": cost.seconds and found.recomputed / cost.seconds,
            "fastest": found.fastest and found.fastest._asdict(),
            "candidate": chosen.name,
        }
        return ways

    def _by_hand(self, way: str) -> dict[str, Any]:
        lossy = functools.partial(self.model.loss, way=way)
        known: dict[int, dict[str, Any]] = {}

        @functools.cache
        def predicted(batch: int) -> tuple[int, int]:
            return predicted_peak(
                lossy, self._args(batch), self.model.has_aux, self.target.platform
            )

        start = predicted_start(
            lambda batch: predicted(batch)[0],
            lambda batch: predicted(batch)[1],
            self.budget, self.step, self.most,
        )  # fmt: skip
        if start is None:
            return {"batch": 0}

        def peak(batch: int) -> int:
            known[batch] = self._cost(lossy, batch)
            return known[batch]["peak"]

        batch = largest_within(peak, self.budget, self.step, self.most, start)
        peaks = {str(batch): each["peak"] for batch, each in known.items()}
        if not batch:
            return {"batch": 0, "peaks": peaks}
        ratio = self._flops(lossy) / self._flops(self.model.loss)
        return {"batch": batch, "flops": ratio, "peaks": peaks} | known[batch]

    def _cost(self, fn: Any, batch: int) -> dict[str, Any]:
        """Return the peak of a batch, and its examples a second where they are known."""
        cost = self.compiled(fn, self._args(batch))
        stated = cost["stated"]
        return {"peak": cost["peak"], "per_second": batch / stated if stated else None}

    def compiled(self, fn: Any, args: tuple[Any, ...]) -> dict[str, Any]:
        """Return the peak of a gradient, and its stated seconds where they are known."""
        program = jax.value_and_grad(fn, has_aux=self.model.has_aux)
        lowered = jax.jit(program).lower(*args)
        memory, compiled = compiled_with_memory(lowered, self.target.platform)
        stated = compiled and program_figures(compiled, self.target)["stated"]
        return {"peak": memory.peak, "stated": stated or None}

    def _args(self, batch: int) -> tuple[Any, ...]:
        return self.model.args(batch, self.mesh)

    def _flops(self, fn: Any) -> int:
        program = jax.value_and_grad(fn, has_aux=self.model.has_aux)
        return flops(jax.make_jaxpr(program)(*self._args(self.step)))


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[None]]:
    """Yield a list that grows by one for each program that is compiled."""
    found: list[None] = []
    compile_ = jax.stages.Lowered.compile

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        found.append(None)
        return compile_(self, *args, **options)

    jax.stages.Lowered.compile = counted  # ty: ignore
    try:
        yield found
    finally:
        jax.stages.Lowered.compile = compile_


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the models, the targets and the ways."""
    add = parser.add_argument
    add("--models", type=names_of(MODELS), default=list(MODELS), help="default: all")
    add("--ways", type=names_of(WAYS), default=list(WAYS), help="default: all")
    add(
        "--targets",
        type=lambda text: text.split(","),
        default=["v5e", "h100"],
        help="names of jrc.target, default: v5e,h100",
    )


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, plot=plot, problems=beaten,
    toy={"models": ["gpt2_124m"], "ways": [PLAN, FULL, MAXTEXT[-1]]}, keys=("rows",),
    platform="cpu",
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
