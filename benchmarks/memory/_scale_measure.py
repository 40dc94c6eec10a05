"""What `scale.py` measures of a GPT on one device: sizes that fit, and seconds at equal memory."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jrc
from benchmarks._lib.gradient import counts
from benchmarks._models.catalogue import array, drawn
from benchmarks.memory._scale_policies import PLAIN, WAYS, loss
from jrc.models import gpt
from jrc.remat._memory import memory_of

SEQUENCE_STEP, MOST = 64, 2**17

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Model:
    """The GPT, as long as the batch that it is given.

    Attributes:
        config: Its sizes; the length is that of the speed section.
        dtype: What it computes in.
    """

    config: gpt.Config
    dtype: str

    def loss(self, params: Any, batch: Any, way: str = PLAIN) -> Any:
        """With the blocks recomputed in one of the ways by hand."""
        config = dataclasses.replace(self.config, length=batch.shape[1] - 1)
        params = jax.tree.map(lambda x: x.astype(self.dtype), params)
        return loss(params, batch, config=config, loop=WAYS[way])

    def args(self, batch: int, length: int) -> tuple[Any, Any]:
        """Shapes of the parameters, float32, and of a batch, int32."""
        config = dataclasses.replace(self.config, length=length)
        params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
        return params, array(batch, length + 1, dtype=jnp.int32)


def sizes(model: Model, memory: int, run: bool, say: Say) -> dict[str, Any]:
    """The largest batch at the model's length, and the longest sequence alone."""

    def largest(what: str, make_args: Callable[[int], Any], step: int) -> dict[str, Any]:
        say(what)
        found = jrc.largest_batch(make_args, model.loss, memory, multiple_of=step, most=MOST)
        row: dict[str, Any] = {"step": step, "plain": found.plain, "planned": found.recomputed}
        if found.plan is None:
            return row
        cost = found.plan.verified or found.plan.predicted
        row |= {"peak": cost.peak_bytes, "flops": cost.flops_ratio}
        if run:
            say(f"{what}: running")
            planned = found.plan.apply(model.loss)
            row["ran"] = {
                "plain": runs(model.loss, make_args, found.plain),
                "plain, one more": runs(model.loss, make_args, found.plain + step),
                "planned": runs(planned, make_args, found.recomputed),
            }
        return row

    length = model.config.length
    return {
        "memory": memory,
        "batch": largest("largest batch", lambda batch: model.args(batch, length), 1),
        "sequence": largest("longest sequence", lambda n: model.args(1, n), SEQUENCE_STEP),
    }


def runs(fn: Any, make_args: Callable[[int], Any], size: int) -> bool | None:
    """Whether a gradient of that size ran, or there was no memory for it; `None` of size 0."""
    if size == 0:
        return None
    try:
        jax.block_until_ready(jax.jit(jax.value_and_grad(fn))(*drawn(make_args(size))))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def speed(
    model: Model, memory: int, batch: int, ways: Sequence[str], laps: tuple[int, int], say: Say
) -> dict[str, Any]:
    """Every way that fits, beside the plan within its peak and nothing re-run.

    Args:
        model: What is differentiated.
        memory: Bytes of the device; what needs more is not run.
        batch: Sequences of a gradient.
        ways: Names of `WAYS`.
        laps: Rounds to warm up, and rounds that count.
        say: Told what is being done.
    """
    shapes = model.args(batch, model.config.length)
    args, plain = drawn(shapes), Compiled.of(model.loss, shapes)
    rows: dict[str, Any] = {}
    for name in ways:
        say(f"{name}: compiling")
        theirs = Compiled.of(functools.partial(model.loss, way=name), shapes)
        rows[name] = theirs.cost(plain)
        if theirs.peak > memory:
            continue
        steps = {"theirs": theirs} | _planned(model, shapes, theirs.peak)
        if plain.peak <= memory:
            steps["plain"] = plain
        say(f"{name}: running")
        seconds = in_turns({each: step.run for each, step in steps.items()}, args, laps)
        rows[name] |= {"seconds": seconds}
        if "plan" in steps:
            rows[name]["plan"] = steps["plan"].cost(plain)
    return {"batch": batch, "length": model.config.length, "laps": laps, "rows": rows}


def _planned(model: Model, shapes: Any, budget: int) -> dict[str, "Compiled"]:
    """The plan within a peak, or nothing where none is so lean."""
    try:
        plan = jrc.plan(model.loss, *shapes, budget=budget)
    except jrc.BudgetError:
        return {}
    return {"plan": Compiled.of(plan.apply(model.loss), shapes)}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A gradient program and what it costs.

    Attributes:
        run: Called with the arguments.
        peak: Bytes, as XLA states them.
        flops: With loops times their length.
    """

    run: Callable[..., Any]
    peak: int
    flops: int

    @classmethod
    def of(cls, fn: Callable[..., Any], shapes: Any) -> "Compiled":
        compiled = jax.jit(jax.value_and_grad(fn)).lower(*shapes).compile()
        return cls(compiled, memory_of(compiled).peak, counts(fn, shapes, False)["flops"])

    def cost(self, base: "Compiled") -> dict[str, Any]:
        return {"peak": self.peak, "flops": self.flops / base.flops}


def in_turns(
    steps: dict[str, Callable[..., Any]], args: Any, laps: tuple[int, int]
) -> dict[str, list[float]]:
    """Seconds of each, lap by lap, so that noise hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for lap in range(sum(laps)):
        for name, step in steps.items():
            began = time.perf_counter()
            jax.block_until_ready(step(*args))
            if lap >= laps[0]:
                seconds[name].append(time.perf_counter() - began)
    return seconds
