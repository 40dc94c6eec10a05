"""Random keys as data: folding them."""

from typing import Any

import jax

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


def fold_all(key: Any, *numbers: Any) -> Any:
    """One key for a place in a run: folded with each number in turn (step, replica, …)."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
