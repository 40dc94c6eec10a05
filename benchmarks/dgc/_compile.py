"""Compile time of a ramp beside that of a fixed level, in a process with devices for it.

Settings: `repeats`, `toy` and `platform`. The answer has, for one replica and for four (as many
virtual devices on a CPU), the seconds of tracing, lowering and compiling one whole step of a
ResNet-50 with a fixed level and with a ramp of five levels, compiled in turns.
"""

import statistics
import time
from typing import Any

import jax
from jax.sharding import AxisType

from benchmarks._lib import child, platform
from benchmarks._lib.timing import ratios
from benchmarks.dgc._steps import AXIS, FIXED, RAMP, in_place, optimizer, over_mesh, residual

REPLICAS = (1, 4)
STAGES = ("trace", "lower", "compile")
LEVELS = {"fixed": FIXED, "ramp": RAMP}


def in_child(repeats: int, toy: bool, platform: str | None) -> dict[str, Any]:
    """Return the answer of this module in a process of its own: JAX counts devices as it starts."""
    settings = {"repeats": repeats, "toy": toy, "platform": platform}
    env = {"JAX_NUM_CPU_DEVICES": str(max(REPLICAS)), "XLA_FLAGS": ""}
    (rows,) = child.results_of("dgc._compile", settings, env)
    return {"repeats": repeats, "rows": rows}


def stages(like: Any, replicas: int, options: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each stage of one program, from cold caches."""
    jax.clear_caches()
    tx = optimizer(axis_name=AXIS if replicas > 1 else None, **options)
    mesh = jax.make_mesh((replicas,), (AXIS,), axis_types=(AxisType.Auto,))
    step, args = over_mesh(in_place(tx), tx, like, mesh if replicas > 1 else None)
    clock = [time.perf_counter()]
    traced = step.trace(*args)
    clock.append(time.perf_counter())
    lowered = traced.lower()
    clock.append(time.perf_counter())
    lowered.compile()
    clock.append(time.perf_counter())
    seconds = zip(STAGES, clock[:-1], clock[1:], strict=True)
    return {stage: end - start for stage, start, end in seconds}


def study(repeats: int, toy: bool) -> dict[str, Any]:
    """Return the figures by number of replicas, as far as there are devices."""
    like = residual(toy)
    counts = (count for count in REPLICAS if count <= jax.device_count())
    return {str(count): _row(like, count, repeats) for count in counts}


def _row(like: Any, replicas: int, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in LEVELS}
    for _ in range(repeats):
        for name, options in LEVELS.items():
            runs[name].append(stages(like, replicas, options))
    totals = {name: [sum(run.values()) for run in runs[name]] for name in LEVELS}
    row: dict[str, Any] = {
        name: {stage: statistics.median(run[stage] for run in runs[name]) for stage in STAGES}
        | {"seconds": statistics.median(totals[name])}
        for name in LEVELS
    }
    over = sorted(ratios(totals["ramp"], totals["fixed"]))
    return row | {"ratios": over, "ratio": statistics.median(over)}


if __name__ == "__main__":
    settings = child.settings()
    platform.use(settings["platform"])
    child.answer(study(settings["repeats"], settings["toy"]))
