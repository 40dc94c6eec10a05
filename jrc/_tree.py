"""Pytrees with arrays and other leaves: their arrays, names and abstract values.

>>> import jax.numpy as jnp
>>> arrays, rest = split({"x": jnp.ones(2), "mode": "train", "none": None})
>>> len(arrays), rest.fill(["new"])
(1, {'mode': 'train', 'none': None, 'x': 'new'})
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jrc._errors import some_of


class _Hole:
    """A placeholder for an array that was taken out."""

    def __repr__(self) -> str:
        return "<array>"


_HOLE = _Hole()


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A pytree without its arrays, whose other leaves are plain Python values."""

    treedef: Any
    leaves: tuple[Any, ...]

    @property
    def static(self) -> tuple[tuple[int, Any], ...]:
        """The leaves that are no arrays, each with its position."""
        return tuple((i, x) for i, x in enumerate(self.leaves) if x is not _HOLE)

    def fill(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with these arrays in the places of those taken out."""
        new = iter(arrays)
        return self.treedef.unflatten(next(new) if x is _HOLE else x for x in self.leaves)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A value that is no array, such as an activation function, as a node without leaves.

    A function is called as it is.

    Attributes:
        value: The value, hashable.
    """

    value: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.value(*args, **kwargs)


def with_static(tree: Any) -> Any:
    """Return a tree whose leaves are arrays: functions, texts and Python's numbers are `Static`.

    >>> jax.tree.leaves(with_static({"act": max, "rate": 0.5, "w": np.ones(2)}))
    [array([1., 1.])]
    """

    def is_static(leaf: Any) -> bool:
        is_value = isinstance(leaf, str | bytes | int | float | complex)
        return callable(leaf) or (is_value and not isinstance(leaf, np.generic))

    return jax.tree.map(lambda leaf: Static(leaf) if is_static(leaf) else leaf, tree)


def without_static(tree: Any) -> Any:
    """Return a tree with the values themselves in the place of `Static`."""
    is_one = lambda node: isinstance(node, Static)  # noqa: E731
    return jax.tree.map(lambda node: node.value if is_one(node) else node, tree, is_leaf=is_one)


def is_array(leaf: Any) -> bool:
    """Whether this is an array of JAX (tracers included) or NumPy, and not a Python scalar."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_number(leaf: Any) -> bool:
    """Whether JAX accepts this as an array: a JAX or NumPy array, or a Python number."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "biufcV"
    return isinstance(leaf, jax.Array | bool | int | float | complex)


def is_traced(leaf: Any) -> bool:
    """Whether a traced function gets a tracer for this leaf: JAX arrays and shapes.

    Other leaves are passed unchanged, so that `range(n)`, `if train:` and NumPy work.
    """
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def has_tracers(tree: Any) -> bool:
    """Whether an array of a tree is a tracer."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def aval_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the abstract value of a leaf: what `jax.jit` traces in its place.

    Args:
        leaf: An array of JAX or NumPy, a tracer, a `jax.ShapeDtypeStruct`, or a Python number.

    Returns:
        Shape, dtype and `weak_type` as JAX traces them (a Python float is a weak float32), and the
        sharding where one is prescribed: that of a committed array, of a `jax.ShapeDtypeStruct`,
        or of a tracer with explicit mesh axes. Anything else may be placed anywhere.

    Raises:
        TypeError: If JAX does not accept the leaf as an array.

    >>> aval_of(2.0)
    ShapeDtypeStruct(shape=(), dtype=float32, weak_type=True)
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=_sharding_of(leaf, aval)
    )


def _sharding_of(leaf: Any, aval: Any) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        # For automatic and manual mesh axes the type of a tracer names no axis.
        return aval.sharding if any(aval.sharding.spec) else None
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


def is_floating(leaf: Any) -> bool:
    """Whether a value has a derivative: real or complex floating."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def all_finite(tree: Any) -> jax.Array:
    """Return whether each floating entry of each leaf is finite, `bool[]`.

    >>> bool(all_finite({"w": jnp.array([1.0, -jnp.inf]), "n": 3}))
    False
    """
    floats = [x for x in map(jnp.asarray, jax.tree.leaves(tree)) if is_floating(x)]
    checks = [_is_finite(x) for x in floats]
    return jnp.stack(checks).all() if checks else jnp.bool_(True)


def _is_finite(x: jax.Array) -> jax.Array:
    # A finite number less itself is 0, any other NaN. XLA adds these up in one pass, without an
    # array of booleans; its maximum loses NaN, over devices and in large arrays on a CPU. Float16
    # it adds up in a copy, and small floats have no zero.
    if x.dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
        return jnp.sum(x - x) == 0
    return jnp.isfinite(x).all()


def sum_dtype(dtype: Any) -> Any:
    """Return the dtype of a sum, at least float32; JAX itself promotes no 8-bit floats."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if small else jnp.promote_types(dtype, jnp.float32)


def has_wide_range(leaf: Any) -> bool:
    """Whether a value has the range of float32, as bfloat16 has and float16 has not."""
    return not is_floating(leaf) or float(jnp.finfo(leaf.dtype).max) >= 1e38


def added(x: jax.Array, change: jax.Array) -> jax.Array:
    """Return the sum in the dtype of `x`; 8-bit floats saturate at their largest number."""
    new = x.astype(sum_dtype(x.dtype)) + change
    if x.dtype.itemsize == 1:
        limits = jnp.finfo(x.dtype)
        new = jnp.clip(new, float(limits.min), float(limits.max))
    return new.astype(x.dtype)


def is_typed_key(leaf: Any) -> bool:
    """Whether this is a `jax.random.key` array; a raw `uint32` key looks like data."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def kind_of(leaf: Any) -> str:
    """Return the type of a leaf as text: `float32[4, 2]`, `None`, `str`."""
    if not (is_number(leaf) or is_traced(leaf)):
        return "None" if leaf is None else type(leaf).__name__
    dtype = leaf.dtype if is_typed_key(leaf) else jnp.result_type(leaf)
    return f"{dtype}{list(jnp.shape(leaf))}"


def plain(tree: Any) -> Any:
    """Return the shapes of a tree, without shardings."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype if is_typed_key(x) else jnp.result_type(x)
        return jax.ShapeDtypeStruct(np.shape(x), dtype)

    return jax.tree.map(shape, tree)


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array with this sharding, as `jax.device_put`, over several processes too.

    There `jax.device_put` takes no typed keys, compares other arrays between the processes, and
    takes an array of several processes to no other devices: each process gets all of it first.

    Args:
        x: An array that lies on several processes, or on this one; then equal on all.
        sharding: Where it will lie.

    Raises:
        ValueError: On all processes, if the new devices are of fewer ones than the array's.
    """
    if isinstance(x, jax.core.Tracer):
        return jax.device_put(x, sharding)
    is_apart = isinstance(x, jax.Array) and not x.is_fully_addressable
    if is_apart:
        _check_processes(x.sharding.device_set, sharding.device_set)
    if not sharding.mesh.is_multi_process:
        return jax.device_put(x, sharding)
    if is_typed_key(x):
        words = put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    if is_apart and x.sharding.device_set == sharding.device_set:
        return jax.device_put(x, sharding)
    whole = np.asarray(multihost_utils.process_allgather(x, tiled=True) if is_apart else x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _check_processes(before: Iterable[jax.Device], after: Iterable[jax.Device]) -> None:
    """Raise on all processes if one of them would keep nothing: the others would wait for it."""
    had, have = ({device.process_index for device in each} for each in (before, after))
    if gone := sorted(had - have):
        raise ValueError(
            "mesh must have devices of every process that has a part of the state, got none of "
            f"{'process' if len(gone) == 1 else 'processes'} {', '.join(map(str, gone))}. Save the "
            "state with jrc.save, start without them and restore it."
        )


def split(tree: Any) -> tuple[list[Any], Skeleton]:
    """Return the JAX arrays of a tree in order, and the tree without them."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_traced(leaf)]
    return arrays, Skeleton(treedef, tuple(_HOLE if is_traced(leaf) else leaf for leaf in leaves))


def nodes_of(tree: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the outermost nodes of some types, in tree order.

    >>> [type(node).__name__ for node in nodes_of({"a": (1, Static(2)), "b": [Static(3)]}, Static)]
    ['Static', 'Static']
    """
    is_one = lambda node: isinstance(node, kinds)  # noqa: E731
    return list(filter(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def path_name(path: Sequence[Any]) -> str:
    """Return the name of a leaf: `layer_0/w`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return every leaf with its name, in tree order."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), leaf) for path, leaf in pairs]


def tree_difference(
    wanted: Any, given: Any, is_leaf: Callable[[Any], bool] | None = None
) -> str | None:
    """Return in words, by the paths of leaves, how a tree differs from another; `None` if not.

    >>> tree_difference({"w": 1, "b": 2}, {"w": 1, "c": 2})
    "leaf 'b' is missing; leaf 'c' is not expected"
    """
    both = [jax.tree_util.tree_flatten_with_path(tree, is_leaf) for tree in (wanted, given)]
    if both[0][1] == both[1][1]:
        return None
    first, second = (
        {jax.tree_util.keystr(path): path_name(path) for path, _ in x} for x, _ in both
    )
    found = place_difference(first, second, "missing", "not expected")
    return found or "the same leaves, in nodes of other types"


def place_difference(
    wanted: Mapping[str, str], given: Mapping[str, str], absent: str, beyond: str
) -> str:
    """Return in words which leaves only one of two trees has, empty if there is none.

    Args:
        wanted: The leaves of a tree: the name, `layer_0/w`, by the exact place, `['layer_0']['w']`.
        given: The leaves of the other one.
        absent: What a leaf of the first alone is.
        beyond: What a leaf of the second alone is.
    """
    parts = []
    for one, other, fact in ((wanted, given, absent), (given, wanted, beyond)):
        # A key 0 and a key "0" have one name.
        taken = set(other.values())
        names = [x if x not in taken else k for k, x in one.items() if k not in other]
        if names:
            are = "leaf {} is" if len(names) == 1 else "leaves {} are"
            parts.append(f"{are.format(some_of([x or 'the tree itself' for x in names]))} {fact}")
    return "; ".join(parts)


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes over which an array, or an array of a type, varies in a `shard_map`."""
    kind = getattr(getattr(x, "aval", x), "mat", None)
    return frozenset(getattr(kind, "varying", ()))
