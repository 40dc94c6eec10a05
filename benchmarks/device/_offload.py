"""Bytes a second of copies to pinned host memory and back, and the share of copies that is hidden.

The program is a chain of layers gelu(x @ w). The activations of all but the last are saved on the
device, or offloaded by `jrc.Offload`. With t seconds with them on the device, o seconds with them
offloaded and c seconds of the copies alone, the hidden share is 1 - (o - t) / c.
"""

import functools
import statistics
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import jrc
from benchmarks._private import in_turns, memory_of, program_figures
from benchmarks.device._rows import Row, Settings, serve

HOST, DEVICE = "pinned_host", "device"
COPY, LAYERS = "copy", "layers of "
WIDTHS, TOY_WIDTH = (4096, 8192, 16384), 64
NAMES = (COPY, *(f"{LAYERS}{width}" for width in WIDTHS))
TOY_NAMES = (COPY, f"{LAYERS}{TOY_WIDTH}")
DEPTH, TOKENS, TOY_TOKENS = 6, 16_384, 128
COPIED, TOY_COPIED = 2**30, 2**20
ROUNDS, TOY_ROUNDS = 10, 2


def measure(name: str, settings: Settings) -> Iterator[Row]:
    """Yield the bytes a second of copies, or seconds of a chain of layers in both ways."""
    toy = settings.toy
    yield copied(toy) if name == COPY else chain(int(name.removeprefix(LAYERS)), toy)


def copied(toy: bool) -> Row:
    """Return the bytes a second of both directions, of one large array."""
    size, device = TOY_COPIED if toy else COPIED, jax.local_devices()[0]
    there, here = (
        functools.partial(jax.device_put, device=SingleDeviceSharding(device, memory_kind=kind))
        for kind in (HOST, DEVICE)
    )
    x = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    y = there(x)
    seconds = in_turns(
        {"to host": lambda: there(x), "to device": lambda: here(y)}, TOY_ROUNDS if toy else ROUNDS
    )
    rates = {way: size / statistics.median(each) for way, each in seconds.items()}
    return {"bytes": size, "rates": rates, "copies": device.platform != "cpu"}


def chain(width: int, toy: bool) -> Row:
    """Return seconds, peaks and the bytes that are copied each way, of a chain of layers."""
    tokens = TOY_TOKENS if toy else TOKENS
    keys = jax.random.split(jax.random.key(0), DEPTH + 1)
    weights = [jax.random.normal(k, (width, width), jnp.bfloat16) / width**0.5 for k in keys[1:]]
    x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    found: Row = {"bytes": 2 * tokens * width * (DEPTH - 1), "ways": {}}
    calls = {}
    for way, rule in ways().items():
        with warnings.catch_warnings():
            # On a CPU all memory is the host's, and jrc says so.
            warnings.simplefilter("ignore")
            run = jax.value_and_grad(jrc.apply_rules(loss, rule))
            compiled = jax.jit(run).lower(weights, x).compile()
        found["ways"][way] = {"peak": memory_of(compiled).peak} | program_figures(compiled)
        calls[way] = functools.partial(compiled, weights, x)
    for way, seconds in in_turns(calls, TOY_ROUNDS if toy else ROUNDS).items():
        found["ways"][way]["seconds"] = statistics.median(seconds)
    return found


def ways() -> dict[str, Any]:
    """Return the rule of each way: everything but the activations is recomputed in both."""
    names = [f"layer_{i}" for i in range(DEPTH - 1)]
    return {"saved": jrc.Save(*names), "offloaded": jrc.Offload(*names, to=HOST)}


def loss(weights: Any, x: Any) -> Any:
    """Return a number that depends on a chain of layers."""
    for i, w in enumerate(weights):
        x = jrc.mark(jax.nn.gelu(x @ w), f"layer_{i}")
    return jnp.mean(x.astype(jnp.float32) ** 2)


if __name__ == "__main__":
    serve(measure)
