"""Which leaves of a gradient tree take which path: the places that trees share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jrc._typing import PyTree
from jrc.dgc._state import DGCState, is_slot

Places = tuple[int, ...]
"""Positions in the flattened tree, counting `None` and masked-out leaves."""


class Slots(NamedTuple):
    """Places of the compressed leaves and of those on the dense path.

    The others (integers, `None`, masked-out leaves) have no state.
    """

    compressed: Places
    dense: Places

    @property
    def floating(self) -> Places:
        """Places of all leaves with state, in the tree's order."""
        return tuple(sorted(self.compressed + self.dense))


def pick(tree: PyTree, places: Places) -> list[Any]:
    """The leaves of a tree that stand at some places."""
    leaves = jax.tree.leaves(tree, is_leaf=is_slot)
    return [leaves[place] for place in places]


def put(tree: PyTree, places: Places, new: list[Any]) -> PyTree:
    """The tree with other leaves at some places."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_slot)
    for place, leaf in zip(places, new, strict=True):
        leaves[place] = leaf
    return treedef.unflatten(leaves)


def only(tree: PyTree, places: Places) -> PyTree:
    """The tree with all leaves masked out but those at some places."""
    masked = jax.tree.map(lambda _: optax.MaskedNode(), tree, is_leaf=is_slot)
    return put(masked, places, pick(tree, places))


def align(gradients: PyTree, state: DGCState) -> Slots:
    """Finds the path of each gradient from the state that was made for its parameter.

    Args:
        gradients: The tree given to `update`.
        state: Made by `init` for parameters of the same structure.

    Returns:
        The places of the leaves on each path.

    Raises:
        TypeError: When the state is another transform's.
        ValueError: When structure, dtype or size do not match.
    """
    if not isinstance(state, DGCState):
        raise TypeError(
            f"jrc.scale_by_dgc: the state must be a DGCState, got {type(state).__name__}; start "
            "with state = tx.init(params), and give a chain's state to the chain"
        )
    paths, treedef = jax.tree.flatten_with_path(gradients, is_leaf=is_slot)
    flat, expected = jax.tree.flatten(state.u, is_leaf=is_slot)
    shaped = jax.tree.leaves(state.velocity, is_leaf=is_slot)
    if treedef != expected:
        raise ValueError(
            "jrc.scale_by_dgc: the gradients must have the structure of the parameters that init "
            f"saw, {expected}, got {treedef}; init the state again for these parameters"
        )
    slots = Slots(
        tuple(place for place, buffer in enumerate(flat) if not is_slot(buffer)),
        tuple(place for place, buffer in enumerate(shaped) if not is_slot(buffer)),
    )
    for place in slots.compressed:
        _check(*paths[place], flat[place].shape, lambda gradient: (1, gradient.size))
    for place in slots.dense:
        _check(*paths[place], shaped[place].shape, lambda gradient: gradient.shape)
    return slots


def zero_update(gradient: Any, param: Any) -> Any:
    """The update of a leaf without state: zeros, or the placeholder that stands there."""
    if is_slot(gradient):
        return gradient
    dtype = gradient.dtype if is_slot(param) else jnp.result_type(param)
    # A float0 has no zeros that could be scaled or added.
    numeric = jnp.int32 if dtype == jax.dtypes.float0 else dtype
    return jnp.zeros(gradient.shape, numeric)


def _check(
    path: Any, gradient: Any, kept: tuple[int, ...], shape_of: Callable[[Any], tuple[int, ...]]
) -> None:
    """That a gradient, in the shape that its path keeps, can be added to its buffer."""
    name = f"the gradient of {jax.tree_util.keystr(path) or 'the only leaf'}"
    dtype = getattr(gradient, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        arrived = gradient if is_slot(gradient) else dtype or type(gradient).__name__
        raise ValueError(
            f"jrc.scale_by_dgc: {name} must be a floating array like its parameter, got {arrived}; "
            "freeze a parameter with optax.masked, from init on"
        )
    if shape_of(gradient) != kept:
        raise ValueError(
            f"jrc.scale_by_dgc: {name} must fit its state of shape {kept}, got "
            f"{shape_of(gradient)}; "
            "init the state for these parameters, and under jax.shard_map pass it with the specs "
            "of jrc.dgc_specs(state, axis_name)"
        )


def served(gradients: PyTree, states: Sequence[DGCState]) -> PyTree:
    """Which leaves of a gradient tree any of these states takes care of.

    Leaves that `optax.masked` or `optax.multi_transform` keep from a transform, whole subtrees at
    once sometimes, are nobody's.

    Args:
        gradients: The tree of all gradients.
        states: The states of the transforms that see parts of it.

    Returns:
        The same tree of Booleans.
    """

    def by(state: DGCState) -> PyTree:
        def below(u: Any, velocity: Any, part: PyTree) -> PyTree:
            return jax.tree.map(lambda _: not (is_slot(u) and is_slot(velocity)), part)

        return jax.tree.map(below, state.u, state.velocity, gradients, is_leaf=is_slot)

    nobody = jax.tree.map(lambda _: False, gradients)
    return jax.tree.map(lambda *parts: any(parts), nobody, *map(by, states))
