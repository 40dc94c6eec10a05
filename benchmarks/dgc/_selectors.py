"""Time of every selector, alone and in whole steps, and the magnitudes that it selects."""

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jrc
from benchmarks._lib.timing import quartiles, ratios
from benchmarks._private import Space, entries_to_send, in_turns, largest_masks
from benchmarks.dgc._steps import MOMENTUM, SPARSITY, in_place, one_leaf, optimizer, residual
from jrc.models import gpt

SELECTORS = {
    "exact": jrc.dgc.Exact(),
    "two_stage": jrc.dgc.TwoStage(),
    "blocked": jrc.dgc.Blocked(),
    "global": jrc.dgc.Global(),
    "sampled": jrc.dgc.Sampled(),
}
# The default of `jrc.dgc_momentum`: smaller leaves stay dense.
MIN_SIZE = 16384
WARM_UP = 0.75
SETS = 2
TAIL = 2.0

Flats = list[jax.Array]


def compared(seconds: dict[str, list[float]], base: str) -> dict[str, Any]:
    """Return quartiles of the seconds of each program and of its ratio to `base` in each round."""
    return {
        name: {"seconds": quartiles(own), "ratio": quartiles(ratios(own, seconds[base]))}
        for name, own in seconds.items()
    }


def choosers(sizes: Sequence[int], sparsity: float = SPARSITY) -> dict[str, Callable[..., Any]]:
    """Return each selector, jitted for leaves of these sizes."""
    space, counts = Space(tuple(sizes)), [entries_to_send(size, sparsity) for size in sizes]
    return {
        name: jax.jit(lambda leaves, selector=selector: selector.choose(leaves, counts, space))
        for name, selector in SELECTORS.items()
    }


def layouts(toy: bool) -> dict[str, Any]:
    """Return the shapes of the leaves: one leaf, and those of a ResNet-50."""
    params = residual(toy)
    return {"one leaf": one_leaf(params), "ResNet-50": params}


def large(like: Any) -> list[int]:
    """Return the sizes of the leaves that are compressed."""
    return [leaf.size for leaf in jax.tree.leaves(like) if leaf.size >= MIN_SIZE]


def drawn(kind: str, sizes: Sequence[int]) -> Flats:
    """Return leaves of normal numbers, or of Student's t with 2 degrees of freedom."""
    draw = np.random.default_rng(0)
    if kind == "normal":
        return [jnp.asarray(draw.standard_normal(size, np.float32)) for size in sizes]
    return [jnp.asarray(draw.standard_t(TAIL, size).astype(np.float32)) for size in sizes]


def times(like: Any, rounds: int) -> dict[str, Any]:
    """Time every selector and the mask of a warm-up level, beside max |x|."""
    sizes = large(like)
    leaves = drawn("normal", sizes)
    counts = jnp.asarray([entries_to_send(size, WARM_UP) for size in sizes], jnp.int32)
    programs: dict[str, Callable[..., Any]] = {
        "one pass": jax.jit(lambda leaves: [jnp.max(jnp.abs(leaf)) for leaf in leaves]),
        **choosers(sizes),
        "mask, 25 %": jax.jit(lambda leaves: largest_masks(leaves, counts)),
    }
    calls = {name: lambda run=run: run(leaves) for name, run in programs.items()}
    return compared(in_turns(calls, rounds), "one pass")


def steps(like: Any, rounds: int) -> dict[str, Any]:
    """Time whole optimizer steps on one replica, donated, beside momentum SGD."""
    draw = np.random.default_rng(1)
    sets = [
        jax.tree.map(lambda x: jnp.asarray(draw.standard_normal(x.shape, np.float32)), like)
        for _ in range(SETS)
    ]
    sgd = optax.sgd(1e-3, momentum=MOMENTUM)

    def momentum(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = sgd.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    methods = {"momentum SGD": stepper(momentum, sgd, like, sets)}
    for name in SELECTORS:
        tx = optimizer(selector=name, exchange="allgather")
        methods[name] = stepper(in_place(tx), tx, like, sets)
    tx = optimizer(sparsity=WARM_UP, exchange="dense")
    methods["mask, 25 %"] = stepper(in_place(tx), tx, like, sets)
    return compared(in_turns(methods, rounds), "momentum SGD")


def stepper(
    advance: Callable[..., Any], tx: Any, like: Any, sets: Sequence[Any]
) -> Callable[[], Any]:
    """Return a function that takes one step at each call, on gradients in turn."""
    run = jax.jit(advance, donate_argnums=(1, 2))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    kept = [params, tx.init(params)]
    gradients = itertools.cycle(sets)

    def step() -> Any:
        kept[:] = run(next(gradients), kept[1], kept[0])
        return kept

    return step


def masses(leaves: Flats) -> dict[str, float]:
    """Return the sum of the magnitudes that each selector takes, over that of the exact one."""
    found = {
        name: float(jnp.sum(jnp.abs(choose(leaves).values)))
        for name, choose in choosers([leaf.size for leaf in leaves]).items()
    }
    return {name: mass / found["exact"] for name, mass in found.items()}


def trained(toy: bool) -> tuple[Flats, dict[str, Any]]:
    """Return the accumulated gradients of a small GPT after some steps, and what it was.

    It trains on this library's own source, one byte a token.
    """
    sizes = {"layers": 1, "width": 64, "length": 16} if toy else {"layers": 4, "width": 256}
    config = gpt.Config(**{"length": 64, **sizes})
    source = sorted(pathlib.Path(jrc.__file__).parent.rglob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in source), np.uint8)
    tx = jrc.dgc_momentum(0.02, MOMENTUM, 0, sparsity=SPARSITY, local_grad_clip_norm=1.0)
    params = gpt.init(jax.random.key(0), config)
    state, draw, losses = tx.init(params), np.random.default_rng(0), []
    gradient = jax.value_and_grad(lambda params, batch: gpt.loss(params, batch, config=config))

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = gradient(params, batch)
        return loss, gradients, *in_place(tx)(gradients, state, params)

    for _ in range(4 if toy else 60):
        starts = draw.integers(0, text.size - config.length - 1, 8)
        batch = jnp.stack([text[i : i + config.length + 1] for i in starts]).astype(jnp.int32)
        before = state[0]
        loss, gradients, params, state = step(params, state, batch)
        losses.append(float(loss))
    flat = [g.reshape(-1) for g in jax.tree.leaves(gradients) if g.size >= MIN_SIZE]
    waiting = zip(jax.tree.leaves(before.v), jax.tree.leaves(before.u), flat, strict=True)
    # As in a step: momentum correction comes before the selection.
    leaves = [(v + MOMENTUM * u).reshape(-1) + g for v, u, g in waiting]
    about = {"model": f"GPT {config.layers} x {config.width}", "steps": len(losses)}
    return leaves, about | {"loss": [losses[0], losses[-1]], "entries": sum(map(jnp.size, leaves))}


def study(toy: bool, rounds: int, status: Callable[[str], None]) -> dict[str, Any]:
    """Return times, steps and masses for all layouts."""
    found: dict[str, Any] = {"times": {}, "steps": {}, "mass": {}}
    for name, like in layouts(toy).items():
        status(f"time of the selectors, {name}")
        found["times"][name] = times(like, rounds)
        status(f"time of whole steps, {name}")
        found["steps"][name] = steps(like, rounds)
        for kind in ("normal", "heavy-tailed"):
            status(f"mass, {name}, {kind}")
            found["mass"][f"{kind}, {name}"] = masses(drawn(kind, large(like)))
    status("training")
    leaves, found["trained"] = trained(toy)
    found["mass"]["gradients of a GPT, its leaves"] = masses(leaves)
    found["mass"]["gradients of a GPT, one leaf"] = masses([jnp.concatenate(leaves)])
    sizes = {name: large(like) for name, like in layouts(toy).items()}
    about = {name: {"leaves": len(own), "entries": sum(own)} for name, own in sizes.items()}
    return {"sparsity": SPARSITY, "rounds": rounds, "layouts": about, **found}
