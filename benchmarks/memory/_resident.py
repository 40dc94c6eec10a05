"""Real memory: a process runs a model's gradient program a few times, with or without a plan.

    python benchmarks/plan_rss.py gpt [--plan plan.json] [--toy]

Prints one line of JSON: the resident bytes before the first run, when the program is compiled and
its arguments exist, and the most there were while it ran. Linux only.
"""

import argparse
import ctypes
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax

import jrc
from benchmarks._models.catalogue import MODELS, drawn

STEPS = 3
# Of what lies between the least peak and that of nothing re-run.
FRACTION = 0.25
LARGEST = 2


def study(report: dict[str, Any], say: Callable[[str], None]) -> None:
    """Both processes of the two models with the largest peaks, into the report."""
    models = report["models"]
    order = sorted(models, key=lambda name: models[name]["baseline"]["peak"], reverse=True)
    for name in order[:LARGEST]:
        say(f"{name}: nothing re-run")
        found = {"plain": in_child(name, report["toy"])}
        say(f"{name}: planning")
        model = MODELS[name](report["toy"])
        plan = jrc.plan(model.fn, *model.args, budget=FRACTION, argnums=0, has_aux=model.has_aux)
        found["predicted_peak"] = plan.verified.peak_bytes
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "plan.json")
            path.write_text(plan.to_json())
            say(f"{name}: planned")
            found["planned"] = in_child(name, report["toy"], "--plan", str(path))
        models[name]["rss"] = found


def in_child(name: str, toy: bool, *more: str) -> dict[str, int]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory._resident",
        name,
        *more,
        *(["--toy"] if toy else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def resident(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since the last `forget_most`."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024


def forget_most() -> None:
    """Compiling takes memory too: give back what is free, and count anew from here."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--plan", type=pathlib.Path)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    model = MODELS[options.model](options.toy)
    fn = model.fn
    if options.plan:
        fn = jrc.Plan.from_json(options.plan.read_text()).apply(fn)
    program = jax.jit(jax.value_and_grad(fn, has_aux=model.has_aux))
    compiled = program.lower(*model.args).compile()
    args = jax.block_until_ready(drawn(model.args))
    forget_most()
    start = resident("VmRSS")
    for _ in range(STEPS):
        jax.block_until_ready(compiled(*args))
    print(json.dumps({"start": start, "most": resident("VmHWM")}))


if __name__ == "__main__":
    main()
