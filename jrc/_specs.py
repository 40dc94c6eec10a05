"""How arrays are split over the axes of a mesh: their `PartitionSpec`s, and those of states.

>>> spec = jax.sharding.PartitionSpec(("replica", "fsdp"), None, "model")
>>> axes_of(spec), padded(spec, 4)
(('replica', 'fsdp', 'model'), (('replica', 'fsdp'), None, 'model', None))
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """Return the mesh axes that a spec names, in its order."""
    return tuple(name for entry in spec for name in names_of(entry))


def names_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes that an entry of a spec names."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple) else ()


def restricted(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """Return the spec with these axes only: what a region that is manual over the rest sees."""
    known = frozenset(axes)

    def kept(entry: Any) -> Any:
        names = tuple(name for name in names_of(entry) if name in known)
        return names[0] if len(names) == 1 else names or None

    return trimmed(PartitionSpec(*map(kept, spec)))


def without_axes(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """Return the spec without these axes: what one part along them sees."""
    left_out = frozenset(axes)

    def kept(entry: Any) -> Any:
        names = names_of(entry)
        left = tuple(name for name in names if name not in left_out)
        return entry if left == names else left or None

    return spec.update(partitions=tuple(map(kept, spec)))


def trimmed(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec without `None` at its end: equal splits become equal specs."""
    entries = list(spec)
    while entries and not names_of(entries[-1]):
        entries.pop()
    return PartitionSpec(*entries)


def padded(spec: PartitionSpec, ndim: int) -> tuple[Any, ...]:
    """Return an entry of the spec for each of `ndim` dimensions."""
    return (*spec, *(None for _ in range(ndim - len(spec))))


def spec_of(leaf: Any) -> PartitionSpec:
    """Return how a leaf is split: by its type, or by its committed `NamedSharding`.

    Args:
        leaf: An array, a `jax.ShapeDtypeStruct`, a tracer or a number. Of a tracer only explicit
            mesh axes are known.

    Returns:
        The spec, empty for a leaf that is whole or whose split is not known.
    """
    if isinstance(leaf, jax.core.Tracer):
        sharding = jax.typeof(leaf).sharding
    else:
        sharding = getattr(leaf, "sharding", None)
    return trimmed(sharding.spec) if isinstance(sharding, NamedSharding) else PartitionSpec()


def spec_inside(leaf: Any, mesh: Mesh, axis: str) -> PartitionSpec:
    """Return how a leaf will be split over the axes of a mesh inside of a replica.

    Args:
        leaf: An array or a shape, on this or another mesh.
        mesh: The mesh.
        axis: The axis of the replicas.

    Returns:
        The leaf's own split over the other axes, where the mesh has these and they divide it.
    """
    inside = restricted(spec_of(leaf), set(mesh.axis_names) - {axis})
    entries = [
        entry if size % number_of_shards(PartitionSpec(entry), mesh.shape) == 0 else None
        for entry, size in zip(padded(inside, len(leaf.shape)), leaf.shape, strict=True)
    ]
    spec = trimmed(PartitionSpec(*entries))
    return spec if number_of_shards(spec, mesh.shape) > 1 else PartitionSpec()


def number_of_shards(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    """Return the number of parts that a spec makes on a mesh with axes of these sizes."""
    return math.prod(sizes[name] for name in axes_of(spec))


def shards_of(leaf: Any, first: int, end: int | None = None) -> int:
    """Return the number of parts of an array, or of a shape, along some of its dimensions.

    Args:
        leaf: The array, on whatever mesh.
        first: The first of these dimensions.
        end: The one behind the last; `None` for all.
    """
    spec = PartitionSpec(*spec_of(leaf)[first:end])
    return number_of_shards(spec, leaf.sharding.mesh.shape) if axes_of(spec) else 1


class Mirror(NamedTuple):
    """A leaf of a state, and how the parameter that it belongs to is split.

    Attributes:
        leaf: The leaf.
        spec: That of its parameter; `None` for a leaf of no parameter.
        rows: Whether the leaf has an axis before the shape of its parameter.
    """

    leaf: Any
    spec: PartitionSpec | None
    rows: bool


def mirrored(state: Any, params: Any, specs: Any) -> list[Mirror]:
    """Return each leaf of a state with the spec of the parameter that it belongs to.

    A leaf belongs to the parameter whose path ends its own, the longest if there are several:
    optimizers keep trees of the parameters' structure (`opt_state[0].mu["layer"]["w"]`). This
    holds inside `optax.masked`, `multi_transform` and `MultiSteps` too, where
    `optax.tree.map_params` cannot follow masks that are given as trees.

    Args:
        state: Any tree.
        params: The parameters, or `None` if their shapes are not known.
        specs: A `PartitionSpec` for each, or a single one for all.

    Returns:
        One for each leaf, in tree order. A leaf of another shape than its parameter, as the factors
        of Adafactor are, belongs to none; an axis before the parameter's shape is allowed.
    """
    table = dict(jax.tree.flatten_with_path(specs, is_leaf=is_spec)[0])
    shapes = {path: np.shape(x) for path, x in jax.tree.flatten_with_path(params)[0]}

    def found(path: tuple[Any, ...], leaf: Any) -> Mirror:
        tails = (path[start:] for start in range(len(path) + 1))
        tail = next((tail for tail in tails if tail in table), None)
        if tail is None:
            return Mirror(leaf, None, False)
        spec, shape = table[tail] or PartitionSpec(), np.shape(leaf)
        known = shapes.get(tail)
        rows = known is not None and shape != known and shape[1:] == known
        fits = len(shape) >= len(spec) if known is None else rows or shape == known
        return Mirror(leaf, spec if fits else None, rows)

    return [found(path, leaf) for path, leaf in jax.tree.flatten_with_path(state)[0]]


def is_spec(node: Any) -> bool:
    """Whether a node of a tree of specs is one: `None` means whole, as `PartitionSpec()` does."""
    return node is None or isinstance(node, PartitionSpec)
