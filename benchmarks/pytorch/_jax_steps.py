"""jrc's side of `benchmarks.pytorch.seconds`: one way to run a program, in a process of its own.

Settings: `program`, a name of `_programs.py`; `toy`; `by_hand`, the name of a way by hand, or none;
`plan`, the text of a plan, or none. Each answer is of one value and gradient.
"""

import time
from typing import Any

import jax
import optax

import jrc
from benchmarks._lib import child
from benchmarks._lib.resident_memory import reset_most, resident
from benchmarks.pytorch._programs import PROGRAMS

WARM_UP = 2


def main() -> None:
    """Answer requests for a pass."""
    settings = child.settings()
    program = PROGRAMS[settings["program"]](settings["toy"])
    model, fn = program.model, program.model.fn
    if settings["by_hand"]:
        fn = model.references[settings["by_hand"]]
    if settings["plan"]:
        fn = jrc.Plan.from_json(settings["plan"]).apply(fn)
    gradient = jax.jit(jax.value_and_grad(fn, has_aux=model.has_aux))
    args = jax.block_until_ready(jax.tree.map(jax.numpy.asarray, program.args))
    compiled = gradient.lower(*args).compile()

    def step() -> dict[str, Any]:
        reset_most()
        start, began = resident("VmRSS"), time.perf_counter()
        out, grads = jax.block_until_ready(compiled(*args))
        seconds = time.perf_counter() - began
        most = resident("VmHWM") - start
        loss = out[0] if model.has_aux else out
        found = {"seconds": seconds, "resident": most, "loss": float(loss)}
        return found | {"gradient_norm": float(optax.global_norm(grads))}

    for _ in range(WARM_UP):
        step()
    child.serve(step)


if __name__ == "__main__":
    main()
