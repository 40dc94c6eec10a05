"""Compile time of a ramp beside that of a fixed level, in a process with devices for it.

    python benchmarks/dgc_compile.py [--repeats 5] [--toy]

Prints one line of JSON: for one replica and for four (as many virtual devices where the platform
is the CPU) the seconds of tracing, lowering and compiling one whole step of a ResNet-50 with a
fixed level and with a ramp of five, compiled in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
from jax.sharding import AxisType

from benchmarks._lib import platform as machine
from benchmarks.dgc._steps import AXIS, FIXED, RAMP, optimizer, over_mesh, residual

REPLICAS = (1, 4)
STAGES = ("trace", "lower", "compile")
LEVELS = {"fixed": FIXED, "ramp": RAMP}


def in_child(repeats: int, toy: bool, platform: str | None) -> dict[str, Any]:
    """What a process of its own finds: devices are counted when JAX starts."""
    command = [sys.executable, "-m", "benchmarks.dgc._compile", "--repeats", str(repeats)]
    command += [*(["--toy"] if toy else []), *(["--platform", platform] if platform else [])]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(max(REPLICAS)), "XLA_FLAGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def stages(like: Any, replicas: int, options: dict[str, Any]) -> dict[str, float]:
    """Seconds of each stage of one program, from nothing."""
    jax.clear_caches()
    tx = optimizer(axis_name=AXIS if replicas > 1 else None, **options)
    mesh = jax.make_mesh((replicas,), (AXIS,), axis_types=(AxisType.Auto,))
    step, args = over_mesh(tx.apply, tx, like, mesh if replicas > 1 else None)
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
    like, rows = residual(toy), {}
    for replicas in REPLICAS:
        if replicas > jax.device_count():
            continue
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
        ratios = [ramp / fixed for fixed, ramp in zip(*totals.values(), strict=True)]
        rows[str(replicas)] = row | {"ratios": sorted(ratios), "ratio": statistics.median(ratios)}
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--toy", action="store_true")
    machine.add_platform(parser)
    options = parser.parse_args(argv)
    machine.use(options.platform)
    print(json.dumps(study(options.repeats, options.toy)))


if __name__ == "__main__":
    main()
