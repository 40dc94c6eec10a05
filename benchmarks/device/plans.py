"""Make the plans of `benchmarks.device.all` for an accelerator that is not there yet.

    python -m benchmarks.device.plans --target h100 --out FOLDER
    python -m benchmarks.device.all --plans FOLDER --out RESULTS        (where the accelerator is)

A plan takes as many compilations as its budget asks for. With plans in a folder, the time of the
accelerator is spent on programs that run. Each row's file is written when its plans are made, and
rows that the folder has are left out. The target's compiler must be installed, in the version that
the accelerator has: `pip install 'jax[cuda13]==VERSION'`.
"""

import argparse
import functools
from collections.abc import Callable

import jax

import jrc
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._private import abstract_on, compiled_with_memory
from benchmarks.device import _seconds, _sizes, _speed, _torch
from benchmarks.device._parts import PARTS
from benchmarks.device._plans import Plans, path_of, write_plans
from benchmarks.device._programs import make

NAME = "device.plans"


def measure(run: Run) -> None:
    """Make the plans that the folder does not have."""
    options, target = run.options, jrc.target(run.options.target)
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.only:
        rows = [name for name in PARTS[part].rows(options.toy) if name in (options.rows or [name])]
        for name in rows:
            path = path_of(options.out, part, name, options.toy)
            if path.exists():
                continue
            run.status(f"{part}: {name}")
            if (plans := _MAKERS[part](name, options.toy, target)) is not None:
                write_plans(path, plans)
                run.console.print(f"{path.name}: {', '.join(plans)}")


def _for_seconds(name: str, toy: bool, target: jrc.Target) -> Plans:
    return _seconds.planned(make(name, toy), toy, target.name)


def _for_sizes(name: str, toy: bool, target: jrc.Target) -> Plans | None:
    case = {**_sizes.CASES, **_sizes.TOY_CASES}[name]
    mesh = _sizes.mesh_of(target.devices[0])
    return (
        _sizes.planned(case, mesh, toy, target.budget, target) if case.way == _sizes.PLAN else None
    )


def _for_speed(name: str, toy: bool, target: jrc.Target) -> Plans:
    model = _speed.model_of(toy)
    shapes = model.args(2 if toy else _speed.BATCH, model.config.length)
    theirs = jax.value_and_grad(functools.partial(model.loss, policy=name))
    lowered = jax.jit(theirs).lower(*abstract_on(target, shapes))
    peak = compiled_with_memory(lowered, target.platform)[0].peak
    return _speed.planned(name, toy, peak, target.name)


def _for_torch(name: str, toy: bool, target: jrc.Target) -> Plans:
    return _seconds.planned(_torch.make(toy), toy, target.name)


_MAKERS: dict[str, Callable[[str, bool, jrc.Target], Plans | None]] = {
    _seconds.PART: _for_seconds,
    _sizes.PART: _for_sizes,
    _speed.PART: _for_speed,
    _torch.PART: _for_torch,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the target, parts and rows."""
    add = parser.add_argument
    add("--target", default="h100", help="a name of jrc.targets() (default: h100)")
    add("--only", type=names_of(_MAKERS), default=list(_MAKERS), help="parts (default: all)")
    add("--rows", nargs="+", help="rows (default: all)")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a run without a folder, and unknown rows."""
    if options.out is None:
        parser.error("--out must name a folder for the plans, got none.")
    known = {name for part in options.only for name in PARTS[part].rows(options.toy)}
    if unknown := set(options.rows or ()) - known:
        parser.error(
            f"--rows must be some of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}."
        )


def tables(report: Report) -> list[Table]:
    """Return none: plans are files."""
    return []


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, check_options, files=tuple(_MAKERS), platform="cpu"
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
