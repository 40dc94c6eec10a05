"""Tokens a second of GPT-2's gradient by ways that users write, and of the plan in as many bytes.

What is measured is `benchmarks.memory.scale`'s speed: the way, the plan whose budget is its peak,
and the program with nothing recomputed take turns.
"""

from collections.abc import Iterator

import jax

import jrc
from benchmarks.device._plans import Plans, plans_of
from benchmarks.device._rows import Row, Settings, serve
from benchmarks.memory import scale
from benchmarks.memory._scale_measure import Model, speed
from benchmarks.memory._scale_policies import FULL

PART, PLAN = "speed", "plan"
NAMES = (FULL, "dots_with_no_batch_dims_saveable", "dots_saveable", "save_out_proj", "minimal")

TOY_NAMES = (FULL,)
BATCH, LAPS, TOY_LAPS = 16, (2, 10), (1, 2)


def measure(name: str, settings: Settings) -> Iterator[Row]:
    """Yield peak, FLOPs and seconds of a policy, of the plan, and of the baseline."""
    toy = settings.toy
    stats = jax.local_devices()[0].memory_stats() or {}
    memory, batch = stats.get("bytes_limit", scale.TOY_MEMORY), 2 if toy else BATCH

    def plan_within(peak: int) -> jrc.Plan | None:
        plans, _ = plans_of(settings, PART, name, lambda: planned(name, toy, peak))
        return plans.get(PLAN)

    laps = TOY_LAPS if toy else LAPS
    found = speed(model_of(toy), memory, batch, [name], laps, lambda text: None, plan_within)
    yield {"batch": batch, "length": found["length"]} | found["rows"][name]


def model_of(toy: bool) -> Model:
    """Return GPT-2."""
    return Model(scale.TOY_SIZE if toy else scale.GPT2, "bfloat16")


def planned(name: str, toy: bool, peak: int, target: str | None = None) -> Plans:
    """Return the plan within the peak of a policy, or its error."""
    model = model_of(toy)
    shapes = model.args(2 if toy else BATCH, model.config.length)
    try:
        return {PLAN: jrc.plan(model.loss, *shapes, budget=peak, target=target)}
    except jrc.BudgetError as error:
        return {PLAN: error}


if __name__ == "__main__":
    serve(measure)
