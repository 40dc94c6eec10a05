"""Run a model's gradient a few times and report the resident memory; a process of its own.

Settings: the name of a model, `toy`, and the text of a plan or None. The answer has the resident
bytes before the first run, when the program is compiled and its arguments exist, and the most there
were while it ran. Linux only.
"""

from collections.abc import Callable
from typing import Any

import jax

import jrc
from benchmarks._lib import child
from benchmarks._lib.resident_memory import reset_most, resident
from benchmarks._models.catalogue import MODELS
from benchmarks._models.model import drawn

STEPS = 3
# Budget between the least peak (0) and that of the baseline (1).
FRACTION = 0.25
LARGEST = 2


def study(models: dict[str, Any], toy: bool, status: Callable[[str], None]) -> None:
    """Measure the two models with the largest peaks, with a plan and without."""
    order = sorted(models, key=lambda name: models[name]["baseline"]["peak"], reverse=True)
    for name in order[:LARGEST]:
        status(f"{name}: the baseline")
        found = {"plain": in_child(name, toy)}
        status(f"{name}: planning")
        model = MODELS[name](toy)
        plan = jrc.plan(model.fn, *model.args, budget=FRACTION, argnums=0, has_aux=model.has_aux)
        found["predicted_peak"] = plan.verified.peak_bytes
        status(f"{name}: planned")
        found["planned"] = in_child(name, toy, plan.to_json())
        models[name]["rss"] = found


def in_child(name: str, toy: bool, plan: str | None = None) -> dict[str, int]:
    """Return the answer of this module in a process of its own."""
    settings = {"model": name, "toy": toy, "plan": plan}
    (found,) = child.results_of("memory._resident", settings)
    return found


def main() -> None:
    """Run the program and answer."""
    settings = child.settings()
    model = MODELS[settings["model"]](settings["toy"])
    fn = model.fn
    if settings["plan"]:
        fn = jrc.Plan.from_json(settings["plan"]).apply(fn)
    program = jax.jit(jax.value_and_grad(fn, has_aux=model.has_aux))
    compiled = program.lower(*model.args).compile()
    args = jax.block_until_ready(drawn(model.args))
    reset_most()
    start = resident("VmRSS")
    for _ in range(STEPS):
        jax.block_until_ready(compiled(*args))
    child.answer({"start": start, "most": resident("VmHWM")})


if __name__ == "__main__":
    main()
