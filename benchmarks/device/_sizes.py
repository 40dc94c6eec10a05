"""Large batches and long sequences: three steps of AdamW, and the same with too little memory.

A plan is made for nine tenths of the device's memory less AdamW's moments; beside the plans stand
the baseline and every block recomputed by hand, at a size that fits. The gradient runs three
times, each with the update of the parameters. Then an array fills the memory up to what the
compiler stated for the program and half a batch: it must still run. With one batch less than stated
it must not. The last is also tried as it is meant: the baseline of one batch more, in the memory
of the first.
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
from benchmarks._private import chip_of_device, flops, memory_of, program_figures
from benchmarks.device._kernels import write_kernels
from benchmarks.device._plans import Plans, plans_of
from benchmarks.device._rows import NO_STATS, Row, Settings, is_out_of_memory, serve
from benchmarks.targets._models import AXIS, FULL, MODELS, PLAIN

PART = "sizes"
STEPS = 3
WHOLE = 0.9
_TOKENS = 1024
MORE, PLAN = "one batch more", "plan"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at a size.

    Attributes:
        model: Its name in `benchmarks.targets`.
        batch: Examples.
        length: Tokens of an example; 0 is the model's length.
        way: `PLAN`, or a way by hand of the model. With `PLAIN`, nothing recomputed, a second size
            is tried.
        more: Examples of one batch more.
    """

    model: str
    batch: int
    length: int = 0
    way: str = PLAN
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
    "GPT-2 124M, batch 32, nothing recomputed": Case("gpt2_124m", 32, way=PLAIN, more=8),
    "GPT-2 124M, batch 1,024": Case("gpt2_124m", 1024, more=8),
    "Llama 1B, batch 32, every block recomputed": Case("llama_1b", 32, way=FULL),
    "Llama 1B, batch 64": Case("llama_1b", 64),
    "Llama 1B, 8,192 tokens, every block recomputed": Case("llama_1b", 1, 8192, way=FULL),
    "Llama 1B, 16,384 tokens": Case("llama_1b", 1, 16_384),
    "Llama 1B, 32,768 tokens": Case("llama_1b", 1, 32_768),
    "GPT-2 124M, batch 2,000": Case("gpt2_124m", 2000, more=8),
    "Llama 1B, batch 256": Case("llama_1b", 256),
}
TOY_CASES = {
    "toy GPT-2, batch 2, nothing recomputed": Case("gpt2_124m", 2, way=PLAIN),
    "toy GPT-2, batch 2": Case("gpt2_124m", 2),
    "toy Llama, batch 2, every block recomputed": Case("llama_1b", 2, way=FULL),
}
NAMES, TOY_NAMES = tuple(CASES), tuple(TOY_CASES)


def measure(name: str, settings: Settings) -> Iterator[Row]:
    """Yield what a case's program states and needs in three steps, and whether less is enough."""
    case, device, toy = {**CASES, **TOY_CASES}[name], jax.local_devices()[0], settings.toy
    mesh = mesh_of(device)
    tx = optax.adamw(1e-4)
    with jax.set_mesh(mesh):
        shapes = case.shapes(mesh, toy)
        state = jax.eval_shape(tx.init, shapes[0])
        began = time.perf_counter()
        fn, about = MODELS[case.model](toy).loss, {}
        if case.way == PLAN:
            make = lambda: planned(case, mesh, toy, memory_for(device))  # noqa: E731
            plans, failed = plans_of(settings, PART, name, make)
            if failed:
                raise ValueError(failed[PLAN])
            fn, about = plans[PLAN].apply(fn), about_plan(plans[PLAN])
        else:
            fn = functools.partial(fn, way=case.way)
            about = {"flops": flops_of(fn, shapes) / flops_of(MODELS[case.model](toy).loss, shapes)}
        gradient = jax.jit(jax.value_and_grad(fn)).lower(*shapes).compile()
        drawn, init, update = made(shapes), *optimizer(tx, shapes[0], state)
        memory = memory_of(gradient)
        seconds = program_figures(gradient)["stated"]
        found = about | {"stated": memory.peak, "stated_seconds": seconds}
        found["planning"] = time.perf_counter() - began
        yield found
        params, tokens = jax.block_until_ready(drawn())
        before = stats_of(device)
        params, found = steps(gradient, init, update, params, tokens)
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
        if settings.kernels:
            write_kernels(settings.kernels, name, {case.way: (gradient, run)}, calls=1)
        if case.way == PLAIN:
            shapes = case.shapes(mesh, toy, case.batch + case.more)
            bigger = jax.jit(jax.value_and_grad(fn)).lower(*shapes).compile()
            more = made(shapes[1:])()[0]
            run = functools.partial(bigger, params, more)
            yield {MORE: fits(run, need + share // 2, device)}


def mesh_of(device: Any) -> Mesh:
    """Return the mesh of one device that the models of `benchmarks.targets` are written for."""
    return Mesh(np.asarray([device]), (AXIS,), axis_types=(AxisType.Auto,))


def planned(
    case: Case, mesh: Mesh, toy: bool, memory: int, target: jrc.Target | None = None
) -> Plans:
    """Return the plan of a case within a memory less AdamW's moments, or its error."""
    # Nothing runs on the devices of a target, not even what makes a key.
    loss, shapes = MODELS[case.model](toy).loss, case.shapes(mesh, toy)
    state = jax.eval_shape(optax.adamw(1e-4).init, shapes[0])
    options = {"budget": 0.5} if toy else {"budget": memory, "reserve": state}
    try:
        with jax.set_mesh(mesh):
            return {PLAN: jrc.plan(loss, *shapes, target=target, **options)}
    except jrc.BudgetError as error:
        return {PLAN: error}


def flops_of(fn: Callable[..., Any], shapes: tuple[Any, ...]) -> int:
    """Return the FLOPs of a loss with its gradient."""
    return flops(jax.make_jaxpr(jax.value_and_grad(fn))(*shapes))


def about_plan(plan: jrc.Plan) -> Row:
    """Return what a plan says."""
    cost = plan.verified or plan.predicted
    return {
        "budget": plan.budget,
        "flops": cost.flops_ratio,
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
    """Return what draws random arrays for shapes on the device; token numbers are below 256."""

    def draw() -> Any:
        leaves, treedef = jax.tree.flatten(shapes)
        return treedef.unflatten(map(of, range(len(leaves)), leaves))

    def of(i: int, x: Any) -> Any:
        key = jax.random.key(i)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return 0.02 * jax.random.normal(key, x.shape, x.dtype)
        return jax.random.randint(key, x.shape, 0, 256, x.dtype)

    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(draw, out_shardings=shardings).lower().compile()


def optimizer(tx: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """Return the compiled start of an optimizer, and its compiled update."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    init = jax.jit(tx.init).lower(params).compile()
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        init.output_shardings,
    )
    return init, update.lower(params, placed, params).compile()


def steps(gradient: Any, init: Any, update: Any, params: Any, tokens: Any) -> tuple[Any, Row]:
    """Return the parameters after three steps, and the seconds and the loss of each."""
    state, seconds, losses = init(params), [], []
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
