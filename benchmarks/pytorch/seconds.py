"""Time gradients of the same programs in PyTorch and in JAX, at equal resident memory.

    python -m benchmarks.pytorch.seconds --out benchmarks/results/torch_seconds.json
    python -m benchmarks.pytorch.seconds --models gpt --toy

The programs are some of `_programs.py`; each way runs in a process of its own, float32 on the CPU,
with the same parameters. PyTorch: without a compiler, with every block under
`torch.utils.checkpoint`, and `torch.compile` (Inductor) at four settings of
`activation_memory_budget` and with every block under a checkpoint. JAX: `jax.jit` of the program as
it is written and with every block under `jax.checkpoint`, and plans (`minimize="time"`), one for
what each way of PyTorch needs: its budget is the resident memory of that way and the arguments.

A pass is loss and gradients; the optimizer is left out. All processes are there at once, and run in
turns: one pass each in a round. Resident memory is the most that a pass adds (`VmHWM`), gradients
included. Loss and norm of the gradient of all must agree, or the exit status is 1. Without PyTorch
(`pip install torch`, and a C++ compiler) only JAX is measured. Programs that are not asked for stay
in `--out` as they were.
"""

import argparse
import contextlib
import math
import pathlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax

import jrc
from benchmarks._lib import platform
from benchmarks._lib.child import Worker
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._lib.report import Report
from benchmarks._models.by_hand import EACH
from benchmarks.pytorch._programs import PROGRAMS, Program, asked_for, has_torch
from benchmarks.pytorch._seconds_tables import tables

MODELS = ("gpt", "masked_transformer", "linen_vit", "mirrored_mlp", "unet", "densenet")
ROUNDS, TOY_ROUNDS = 9, 2
FRACTIONS = (0.5, 0.25)
"""The budgets where PyTorch is missing."""
TORCH: Mapping[str, Mapping[str, Any]] = {
    "eager": {"checkpoint": False, "budget": None},
    "eager, checkpoints": {"checkpoint": True, "budget": None},
    **{
        f"compiled, budget {budget}": {"checkpoint": False, "budget": budget}
        for budget in (1.0, 0.5, 0.25, 0.0)
    },
    "compiled, checkpoints": {"checkpoint": True, "budget": 1.0},
}
"""The ways of PyTorch."""


def measure(run: Run) -> None:
    """Measure each program that was asked for."""
    run.report |= platform.machine()
    models = run.report.setdefault("models", {})
    for name, program in asked_for(run):
        models[name] = one(name, program, run)
        run.save()


def one(name: str, program: Program, run: Run) -> Report:
    """Return the figures of one program in all ways."""
    toy, found = run.options.toy, Report()
    found |= {"title": program.model.title, "tolerance": program.tolerance, "failed": {}}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: dict[str, Worker] = {}
        rows: dict[str, list[dict[str, Any]]] = {}

        def start(way: str, module: str, settings: dict[str, Any]) -> None:
            """Start a process, and wait until it has compiled."""
            run.status(f"{name}: {way}")
            worker = stack.enter_context(Worker(f"pytorch.{module}", settings))
            try:
                rows[way] = [worker.ask()]
            except RuntimeError as error:
                found["failed"][way] = str(error)[-500:]
            else:
                workers[way] = worker

        if has_torch():
            given = {"twin": name, "options": program.options}
            given["arguments"] = str(program.written(folder))
            for way, settings in TORCH.items():
                start(f"PyTorch, {way}", "_torch_steps", given | settings)
        given = {"program": name, "toy": toy, "by_hand": None, "plan": None}
        start("JAX, as written", "_jax_steps", given)
        start("JAX, each block", "_jax_steps", given | {"by_hand": EACH})
        asked = {way: row[0]["resident"] for way, row in rows.items() if way.startswith("PyTorch")}
        found["plans"] = {}
        texts: dict[str, str] = {}
        for way, budget in (asked or {f"{x} of the range": x for x in FRACTIONS}).items():
            run.status(f"{name}: a plan for {way}")
            plan = planned(program, budget)
            if plan is None:
                found["plans"][way] = None
                continue
            text = plan.to_json()
            known = texts.setdefault(_decided(plan), f"JAX, plan for {way}")
            found["plans"][way] = known
            if known not in workers:
                start(known, "_jax_steps", given | {"plan": text})
        for i in range(TOY_ROUNDS if toy else ROUNDS):
            run.status(f"{name}: round {i + 1}")
            for way, worker in list(workers.items()):
                try:
                    rows[way].append(worker.ask())
                except RuntimeError as error:
                    found["failed"][way] = str(error)[-500:]
                    del workers[way]
    found["load"] = platform.host()["load"]
    found["ways"] = {way: _of_rounds(rows[way][1:]) for way in workers}
    return found


def planned(program: Program, budget: int | float) -> jrc.Plan | None:
    """Return the plan for bytes besides the arguments, or for a fraction of the range of peaks."""
    model = program.model
    if isinstance(budget, int):
        budget += sum(x.nbytes for x in jax.tree.leaves(program.args))
    try:
        return jrc.plan(model.fn, *model.args, budget=budget, has_aux=model.has_aux)
    except jrc.BudgetError:
        return None


def _decided(plan: jrc.Plan) -> str:
    """What a plan does, by which equal plans for different budgets are one."""
    return repr((plan.decision, plan.chunks))


def _of_rounds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    last = rows[-1]
    return last | {
        "seconds": [row["seconds"] for row in rows],
        "resident": int(statistics.median(row["resident"] for row in rows)),
    }


def problems(report: Report) -> Iterator[str]:
    """Yield where the ways do not compute the same, and ways that failed."""
    for name, found in report["models"].items():
        for way, text in found["failed"].items():
            yield f"{name}: {way} failed: {text}"
        base = found["ways"].get("JAX, as written")
        for way, row in found["ways"].items() if base else ():
            for what in ("loss", "gradient_norm"):
                if not math.isclose(row[what], base[what], rel_tol=10 * found["tolerance"]):
                    yield f"{name}: {way}: {what} is {row[what]}, as written {base[what]}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the programs."""
    parser.add_argument(
        "--models",
        type=names_of(PROGRAMS),
        default=list(MODELS),
        help=f"default: {','.join(MODELS)}",
    )


BENCHMARK = Benchmark(
    "pytorch.seconds", __doc__, measure, tables, add_options, keys=("toy", "models"),
    problems=problems,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
