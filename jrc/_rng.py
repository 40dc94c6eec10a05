"""Random keys: folding and checks."""

from typing import Any

import jax
import jax.numpy as jnp

from jrc._tree import is_typed_key

# Any constant that is not folded into the same key elsewhere.
_RERUN = 0x6A7263


def other_key(leaf: Any) -> Any:
    """Return a typed key, or an array of them, folded with a constant; other leaves unchanged."""
    if not is_typed_key(leaf):
        return leaf
    fold = lambda key: jax.random.fold_in(key, _RERUN)  # noqa: E731
    for _ in leaf.shape:
        fold = jax.vmap(fold)
    return fold(leaf)


def check_key(key: Any) -> None:
    """Raise unless this is one random key, typed or raw."""
    raw = getattr(key, "dtype", None) == jnp.uint32 and key.shape == _raw_shape()
    if not raw and not (is_typed_key(key) and key.shape == ()):
        array = hasattr(key, "dtype")
        arrived = f"{key.dtype}{list(key.shape)}" if array else f"{type(key).__name__} {key!r}"
        raise TypeError(f"key must be one random key, got {arrived}. Write jax.random.key(0).")


def _raw_shape() -> tuple[int, ...]:
    """The shape of a raw key of JAX's default generator: `jax_default_prng_impl` may change it."""
    return jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape


def fold_all(key: Any, *numbers: Any) -> Any:
    """Return the key folded with each number in turn (step, replica, …)."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
