"""Large batches and long sequences: three steps of AdamW, and the same with too little memory.

A plan is made for nine tenths of the device's memory less AdamW's moments. Its gradient runs three
times, each with the update of the parameters. Then an array fills the memory up to what the
compiler stated for the program: it must still run. With one batch less than that it must not.
The last is also tried as it is meant: the baseline of one batch more, where the memory is what
the compiler stated for the batch before.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import jrc
from benchmarks._private import chip_of_device, memory_of
from benchmarks.device._rows import NO_STATS, Row, is_out_of_memory, serve
from benchmarks.targets._models import AXIS, MODELS

STEPS = 3
WHOLE = 0.9
_TOKENS = 1024
MORE = "one batch more"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at a size.

    Attributes:
        model: Its name in `benchmarks.targets`.
        batch: Examples.
        length: Tokens of an example; 0 is the model's length.
        planned: Whether it runs with a plan; else nothing is recomputed, and a second size is
            tried.
        more: Examples of one batch more.
    """

    model: str
    batch: int
    length: int = 0
    planned: bool = True
    more: int = 1

    @property
    def part(self) -> float:
        """The share of the size that one batch, or 1,024 tokens, are."""
        return _TOKENS / self.length if self.length else self.more / self.batch

    def shapes(self, mesh: Mesh, toy: bool, batch: int | None = None) -> tuple[Any, ...]:
        """Return the shapes of the arguments, with shardings."""
        batch = batch or self.batch
        *params, tokens = MODELS[self.model](toy).args(batch, mesh)
        if self.length:
            shape = (batch, self.length + 1)
            tokens = jax.ShapeDtypeStruct(shape, tokens.dtype, sharding=tokens.sharding)
        return *params, tokens


CASES = {
    "GPT-2 124M, batch 32, nothing recomputed": Case("gpt2_124m", 32, planned=False, more=8),
    "GPT-2 124M, batch 1,024": Case("gpt2_124m", 1024, more=8),
    "Llama 1B, batch 64": Case("llama_1b", 64),
    "Llama 1B, 65,536 tokens": Case("llama_1b", 1, 65_536),
    "Llama 1B, batch 256": Case("llama_1b", 256),
    "GPT-2 124M, batch 2,000": Case("gpt2_124m", 2000, more=8),
    "Llama 1B, 131,072 tokens": Case("llama_1b", 1, 131_072),
    "Llama 1B, 524,288 tokens": Case("llama_1b", 1, 524_288),
}
TOY_CASES = {
    "toy GPT-2, batch 2, nothing recomputed": Case("gpt2_124m", 2, planned=False),
    "toy GPT-2, batch 2": Case("gpt2_124m", 2),
}
NAMES, TOY_NAMES = tuple(CASES), tuple(TOY_CASES)


def measure(name: str, toy: bool) -> Iterator[Row]:
    """Yield what a case's program states and needs in three steps, and whether less is enough."""
    case, device = {**CASES, **TOY_CASES}[name], jax.local_devices()[0]
    mesh = Mesh(np.asarray([device]), (AXIS,), axis_types=(AxisType.Auto,))
    tx = optax.adamw(1e-4)
    with jax.set_mesh(mesh):
        shapes = case.shapes(mesh, toy)
        state = jax.eval_shape(tx.init, shapes[0])
        began = time.perf_counter()
        fn, about = program_of(case, shapes, state, toy, device)
        gradient = jax.jit(jax.value_and_grad(fn)).lower(*shapes).compile()
        memory = memory_of(gradient)
        found = about | {"stated": memory.peak, "planning": time.perf_counter() - began}
        yield found
        params, tokens = made(shapes)
        before = stats_of(device)
        params, found = steps(gradient, tx, params, tokens)
        yield found
        if not before:
            yield {"measured": None, "why": NO_STATS}
            return
        most = stats_of(device)["peak_bytes_in_use"]
        moments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        yield {
            "measured": most - before["bytes_in_use"] + memory.arguments - moments,
            "moments": moments,
        }
        # Parameters and gradients do not grow with the batch.
        share = max(1, int((memory.peak - 2 * memory.arguments) * case.part))
        need = memory.peak - memory.arguments
        run = functools.partial(gradient, params, tokens)
        yield {"share": share, "enough": fits(run, need + share // 2, device)}
        yield {"short": fits(run, need - share, device)}
        if not case.planned:
            shapes = case.shapes(mesh, toy, case.batch + case.more)
            bigger = jax.jit(jax.value_and_grad(fn)).lower(*shapes).compile()
            more = made(shapes[1:])[0]
            run = functools.partial(bigger, params, more)
            yield {MORE: fits(run, need + share // 2, device)}


def program_of(
    case: Case, shapes: Any, state: Any, toy: bool, device: Any
) -> tuple[Callable[..., Any], Row]:
    """Return the loss, with a plan where the case has one, and what the plan says."""
    loss = MODELS[case.model](toy).loss
    if not case.planned:
        return loss, {"flops": 1.0}
    options = {"budget": memory_for(device), "reserve": state} if not toy else {"budget": 0.5}
    plan = jrc.plan(loss, *shapes, **options)
    cost = plan.verified or plan.predicted
    return plan.apply(loss), {
        "budget": plan.budget,
        "flops": cost.flops_ratio,
        "stated_seconds": cost.seconds,
        "compilations": plan.compilations,
        "chunks": [each.chunks for each in plan.chunks],
    }


def stats_of(device: Any) -> dict[str, int]:
    """Return what the device's allocator states; nothing on a CPU."""
    return device.memory_stats() or {}


def memory_for(device: Any) -> int:
    """Return nine tenths of the memory of the device's chip, or of what its allocator has."""
    most = stats_of(device).get("bytes_limit")
    chip = chip_of_device(device)
    if chip is None and most is None:
        raise ValueError("the device must state its memory, got None. Use --toy.")
    known = WHOLE * (chip.memory_bytes.value if chip else most)
    return int(min(known, 0.98 * most) if most else known)


def made(shapes: Any) -> Any:
    """Return random arrays for shapes, drawn on the device; every token number is below 256."""

    def of(i: int, x: Any) -> Any:
        key = jax.random.key(i)
        if jnp.issubdtype(x.dtype, jnp.floating):
            draw = lambda: 0.02 * jax.random.normal(key, x.shape, x.dtype)  # noqa: E731
        else:
            draw = lambda: jax.random.randint(key, x.shape, 0, 256, x.dtype)  # noqa: E731
        return jax.block_until_ready(jax.jit(draw, out_shardings=x.sharding)())

    leaves, treedef = jax.tree.flatten(shapes)
    return treedef.unflatten(map(of, range(len(leaves)), leaves))


def steps(gradient: Any, tx: Any, params: Any, tokens: Any) -> tuple[Any, Row]:
    """Return the parameters after three steps, and the seconds and the loss of each."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state, seconds, losses = jax.jit(tx.init)(params), [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        value, gradients = gradient(params, tokens)
        params, state = jax.block_until_ready(update(params, state, gradients))
        del gradients
        seconds.append(time.perf_counter() - began)
        losses.append(float(value))
    return params, {"seconds": seconds, "losses": losses, "tokens": tokens.size}


def fits(run: Callable[[], Any], need: int, device: Any) -> bool | None:
    """Return whether a program runs where an array leaves it `need` bytes; `None` if there is less.

    Args:
        run: The program; its arguments are on the device.
        need: Bytes of the device's memory that are left free.
        device: The device.
    """
    stats = stats_of(device)
    rows = (stats["bytes_limit"] - stats["bytes_in_use"] - need) // 2**20
    if rows < 0:
        return None
    filled = jax.block_until_ready(jnp.zeros((rows, 2**20), jnp.uint8, device=device))
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        filled.delete()
    return True


if __name__ == "__main__":
    serve(measure)
