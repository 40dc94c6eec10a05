"""A tree of arrays as 32-bit words, without loss.

>>> words = to_words((jnp.float32(0.5), jnp.array([True, False])))
>>> [x.tolist() for x in from_words(words[None], (jnp.float32(0), jnp.zeros(2, bool)))]
[[0.5], [[True, False]]]
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrc._bits import as_bits
from jrc._tree import is_typed_key
from jrc._typing import Array, PyTree, UInt


def to_words(tree: PyTree) -> UInt[Array, " words"]:
    """Return the bits of all leaves as uint32 words; leaves of fewer bits take a word an entry."""
    parts = [_as_words(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate([jnp.zeros(0, jnp.uint32), *parts])


def from_words(rows: UInt[Array, "rows words"], like: PyTree) -> PyTree:
    """Return the trees of several rows of words, stacked along a new leading axis.

    Args:
        rows: What `to_words` returned for trees with the shapes and dtypes of `like`.
        like: Such a tree.

    Returns:
        The tree whose leaves have the rows along the leading axis.
    """
    leaves, treedef = jax.tree.flatten(like)
    start, found = 0, []
    for leaf in leaves:
        count = jax.eval_shape(_as_words, leaf).size
        found.append(_from_words(rows[:, start : start + count], leaf))
        start += count
    return treedef.unflatten(found)


def _wide(dtype: Any) -> Any:
    """Return a dtype of at least 32 bits that represents every value of this one."""
    if jnp.dtype(dtype).itemsize >= 4:
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.float32
    return jnp.int32 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint32


def _as_words(leaf: Any) -> Array:
    if is_typed_key(leaf):
        return _as_words(jax.random.key_data(leaf))
    leaf = jnp.asarray(leaf)
    if jnp.iscomplexobj(leaf):
        return _as_words(jnp.stack([leaf.real, leaf.imag], -1))
    wide = leaf.astype(_wide(leaf.dtype))
    return as_bits(wide, jnp.uint32).reshape(-1)


def _from_words(rows: Array, leaf: Any) -> Array:
    if is_typed_key(leaf):
        data = _from_words(rows, jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.zeros((*shape, 2), jnp.zeros((), dtype).real.dtype)
        parts = _from_words(rows, part)
        return lax.complex(parts[..., 0], parts[..., 1])
    wide = jnp.dtype(_wide(dtype))
    each = () if wide.itemsize == 4 else (wide.itemsize // 4,)
    words = rows.reshape(rows.shape[0], *shape, *each)
    return as_bits(words, wide).astype(dtype)
