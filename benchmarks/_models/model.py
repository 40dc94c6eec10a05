"""What a model of the benchmarks is: a loss, the shapes of its arguments, recomputation by hand.

A loss is a plain function without marks that is differentiated for its first argument.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Model:
    """One model at one size.

    Attributes:
        title: The name in tables.
        fn: The loss of `args`, with `has_aux` a pair of the loss and anything else.
        args: Shapes and dtypes of the arguments, parameters first.
        references: The same function with recomputation by hand, by name.
        has_aux: Whether `fn` returns more than a loss.
        scanned: Whether the layers are one loop.
    """

    title: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    references: Mapping[str, Callable[..., Any]]
    has_aux: bool = False
    scanned: bool = False


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def drawn(args: Any, seed: int = 0, numbers: int = 2) -> Any:
    """Return small random arrays for shapes; every class and token number is below `numbers`.

    A gradient that adds rows of a table waits where many tokens are one: two are right for bytes,
    and too few for seconds.
    """
    draw = np.random.default_rng(seed)

    def of(leaf: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(0.1 * draw.standard_normal(leaf.shape), leaf.dtype)
        return jnp.asarray(draw.integers(0, numbers, leaf.shape), leaf.dtype)

    return jax.tree.map(of, args)
