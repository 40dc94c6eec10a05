"""Random keys as data: folding them, and what is one."""

from typing import Any

import jax
import jax.numpy as jnp

from jrc._tree import is_typed_key

# Any constant serves, as long as nothing else folds it into the same key.
_RERUN = 0x6A7263


def other_key(leaf: Any) -> Any:
    """A typed key (or an array of them) changed by a constant; anything else as it is."""
    if not is_typed_key(leaf):
        return leaf
    fold = lambda key: jax.random.fold_in(key, _RERUN)  # noqa: E731
    for _ in leaf.shape:
        fold = jax.vmap(fold)
    return fold(leaf)


def check_key(key: Any, who: str) -> None:
    """Refuse what is not one random key: `fold_in` and `split` say so in JAX's words."""
    raw = getattr(key, "dtype", None) == jnp.uint32 and key.ndim == 1
    if not raw and not (is_typed_key(key) and key.shape == ()):
        array = hasattr(key, "dtype")
        arrived = f"{key.dtype}{list(key.shape)}" if array else f"{type(key).__name__} {key!r}"
        raise TypeError(f"{who}: key is one random key; got {arrived}. Write jax.random.key(0).")


def fold_all(key: Any, *numbers: Any) -> Any:
    """One key for a place in a run: folded with each number in turn (step, replica, …)."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
