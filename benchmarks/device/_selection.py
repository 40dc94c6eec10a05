"""Seconds of one selection of DGC on a leaf, by each selector, and of one pass over the leaf."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks._lib.timing import quartiles
from benchmarks._private import in_turns
from benchmarks.device._rows import Row, Settings, serve
from benchmarks.dgc._selectors import SELECTORS, choosers

PASS = "one pass"
SIZES = {"1M": 10**6, "25M": 25 * 10**6, "100M": 10**8}
TOY_SIZE = "64k"
NAMES = tuple(f"{size} {way}" for size in SIZES for way in (PASS, *SELECTORS))
TOY_NAMES = tuple(f"{TOY_SIZE} {way}" for way in (PASS, *SELECTORS))
ROUNDS, TOY_ROUNDS = 20, 2


def measure(name: str, settings: Settings) -> Iterator[Row]:
    """Yield quartiles of the seconds of a selection of 1/1000 of a leaf of normal numbers."""
    size, way = name.split(maxsplit=1)
    entries = {**SIZES, TOY_SIZE: 2**16}[size]
    leaf = jax.random.normal(jax.random.key(0), (entries,), jnp.float32)
    if way == PASS:
        run = jax.jit(lambda leaves: [jnp.max(jnp.abs(leaf)) for leaf in leaves])
    else:
        run = choosers([entries])[way]
    seconds = in_turns({way: lambda: run([leaf])}, TOY_ROUNDS if settings.toy else ROUNDS)[way]
    yield {"entries": entries, "seconds": quartiles(seconds)}


if __name__ == "__main__":
    serve(measure)
