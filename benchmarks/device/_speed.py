"""Tokens a second of GPT-2's gradient by ways that users write, and of the plan in as many bytes.

What is measured is `benchmarks.memory.scale`'s speed: the way, the plan whose budget is its peak,
and the program with nothing recomputed take turns.
"""

from collections.abc import Iterator

import jax

from benchmarks.device._rows import Row, serve
from benchmarks.memory import scale
from benchmarks.memory._scale_measure import Model, speed
from benchmarks.memory._scale_policies import FULL

NAMES = (FULL, "dots_with_no_batch_dims_saveable", "dots_saveable", "save_out_proj", "minimal")
TOY_NAMES = (FULL,)
BATCH, LAPS, TOY_LAPS = 16, (2, 10), (1, 2)


def measure(name: str, toy: bool) -> Iterator[Row]:
    """Yield peak, FLOPs and seconds of a policy, of the plan, and of the baseline."""
    model = Model(scale.TOY_SIZE if toy else scale.GPT2, "bfloat16")
    stats = jax.local_devices()[0].memory_stats() or {}
    memory, batch = stats.get("bytes_limit", scale.TOY_MEMORY), 2 if toy else BATCH
    found = speed(model, memory, batch, [name], TOY_LAPS if toy else LAPS, lambda text: None)
    yield {"batch": batch, "length": found["length"]} | found["rows"][name]


if __name__ == "__main__":
    serve(measure)
