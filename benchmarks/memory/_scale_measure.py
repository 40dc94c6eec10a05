"""A GPT on one device: the sizes that fit, and seconds at equal memory."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jrc
from benchmarks._lib.gradient import counts
from benchmarks._models.model import array, drawn
from benchmarks._private import in_turns, memory_of
from benchmarks.memory._scale_policies import PLAIN, POLICIES, loss
from jrc.models import gpt

SEQUENCE_STEP, MOST = 64, 2**17

Status = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Model:
    """A GPT whose length follows its batch.

    Attributes:
        config: Its sizes; `length` is that of the speed section.
        dtype: The dtype that it computes in.
    """

    config: gpt.Config
    dtype: str

    def loss(self, params: Any, batch: Any, policy: str = PLAIN) -> Any:
        """Return the loss, with the blocks recomputed under one of the policies."""
        config = dataclasses.replace(self.config, length=batch.shape[1] - 1)
        params = jax.tree.map(lambda x: x.astype(self.dtype), params)
        return loss(params, batch, config=config, loop=POLICIES[policy])

    def args(self, batch: int, length: int) -> tuple[Any, Any]:
        """Return shapes of the parameters, float32, and of a batch, int32."""
        config = dataclasses.replace(self.config, length=length)
        params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
        return params, array(batch, length + 1, dtype=jnp.int32)


def sizes(model: Model, memory: int, run: bool, status: Status) -> dict[str, Any]:
    """Return the largest batch at the model's length, and the longest sequence of one row."""

    def largest(what: str, make_args: Callable[[int], Any], step: int) -> dict[str, Any]:
        status(what)
        found = jrc.largest_batch(make_args, model.loss, memory, multiple_of=step, most=MOST)
        row: dict[str, Any] = {"step": step, "plain": found.plain, "planned": found.recomputed}
        if found.plan is None:
            return row
        cost = found.plan.verified or found.plan.predicted
        row |= {"peak": cost.peak_bytes, "flops": cost.flops_ratio}
        if run:
            status(f"{what}: running")
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
    """Return whether a gradient of that size ran or memory ran out; None for size 0."""
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
    model: Model,
    memory: int,
    batch: int,
    policies: Sequence[str],
    laps: tuple[int, int],
    status: Status,
    plan_within: Callable[[int], jrc.Plan | None] | None = None,
) -> dict[str, Any]:
    """Time every policy that fits, beside the plan within its peak and the baseline.

    Args:
        model: What is differentiated.
        memory: Bytes of the device; a program that needs more is not run.
        batch: Sequences of a gradient.
        policies: Names of `POLICIES`.
        laps: Rounds to warm up, and rounds that count.
        status: Shows what is being done.
        plan_within: Returns the plan within a peak, `None` where none fits; by default it is made.

    Returns:
        For each policy its peak, FLOPs and seconds, and those of the plan.
    """
    shapes = model.args(batch, model.config.length)
    args = drawn(shapes, numbers=model.config.vocabulary)
    plain = Compiled.of(model.loss, shapes)
    plan_within = plan_within or functools.partial(_plan_within, model, shapes)
    rows: dict[str, Any] = {}
    for name in policies:
        status(f"{name}: compiling")
        theirs = Compiled.of(functools.partial(model.loss, policy=name), shapes)
        rows[name] = theirs.cost(plain)
        if theirs.peak > memory:
            continue
        steps = {"theirs": theirs}
        if plan := plan_within(theirs.peak):
            steps["plan"] = Compiled.of(plan.apply(model.loss), shapes)
        if plain.peak <= memory:
            steps["plain"] = plain
        status(f"{name}: running")
        programs = {key: functools.partial(step.run, *args) for key, step in steps.items()}
        rows[name] |= {"seconds": in_turns(programs, laps[1], laps[0])}
        if "plan" in steps:
            rows[name]["plan"] = steps["plan"].cost(plain)
    return {"batch": batch, "length": model.config.length, "laps": laps, "rows": rows}


def _plan_within(model: Model, shapes: Any, budget: int) -> jrc.Plan | None:
    """Return the plan within a peak, or nothing where no plan fits."""
    try:
        return jrc.plan(model.loss, *shapes, budget=budget)
    except jrc.BudgetError:
        return None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A gradient program and what it costs.

    Attributes:
        run: The compiled program.
        peak: Bytes, as XLA states them.
        flops: FLOPs, loops times their length.
    """

    run: Callable[..., Any]
    peak: int
    flops: int

    @classmethod
    def of(cls, fn: Callable[..., Any], shapes: Any) -> "Compiled":
        """Compile the gradient program of a function."""
        compiled = jax.jit(jax.value_and_grad(fn)).lower(*shapes).compile()
        return cls(compiled, memory_of(compiled).peak, counts(fn, shapes, False)["flops"])

    def cost(self, base: "Compiled") -> dict[str, Any]:
        """Return the peak, and FLOPs as a ratio to another program's."""
        return {"peak": self.peak, "flops": self.flops / base.flops}
