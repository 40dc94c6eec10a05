"""The trees of one step, flattened once: everything behind works with lists of leaves."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jrc._tree import named_leaves, tree_difference
from jrc._typing import Array, PyTree
from jrc.dgc._state import DGCState, is_placeholder

Places = tuple[int, ...]
"""Numbers of leaves in the flattened gradient tree; `None` and masked-out leaves count."""


class Leaves(NamedTuple):
    """The leaves of gradients, parameters and state, in the order of the gradient tree.

    Attributes:
        treedef: The structure that they share.
        gradients: This replica's gradients; integers, `None` and masked-out leaves among them.
        params: The parameters, `None` if there are none.
        state: The state, for its scalars.
        u: Local velocities, `MaskedNode` for a leaf that is not compressed.
        v: Accumulated gradients likewise.
        velocity: Velocities of the dense path, `MaskedNode` for a leaf of another kind.
        compressed: Places of the compressed leaves.
        dense: Places of the floating leaves that are too small to compress.
    """

    treedef: Any
    gradients: list[Any]
    params: list[Any] | None
    state: DGCState
    u: list[Any]
    v: list[Any]
    velocity: list[Any]
    compressed: Places
    dense: Places

    @property
    def floating(self) -> Places:
        """Places of all leaves with state, in order."""
        return tuple(sorted(self.compressed + self.dense))

    def tree(self, leaves: Sequence[Any], places: Places, new: Sequence[Any]) -> PyTree:
        """Return the tree of some leaves, with others at some places."""
        return self.treedef.unflatten(put(leaves, places, new))


def pick(leaves: Sequence[Any], places: Places) -> list[Any]:
    """Return the leaves at some places."""
    return [leaves[place] for place in places]


def put(leaves: Sequence[Any], places: Places, new: Sequence[Any]) -> list[Any]:
    """Return the leaves with others at some places."""
    out = list(leaves)
    for place, leaf in zip(places, new, strict=True):
        out[place] = leaf
    return out


def flatten(
    gradients: PyTree,
    state: DGCState,
    params: PyTree | None,
    method: str,
    kind: type[DGCState] = DGCState,
) -> Leaves:
    """Flatten the trees of a step and check that they belong together.

    Args:
        gradients: The tree given to `update` or `apply`.
        state: Made by `init` for parameters of the same structure.
        params: The parameters, if given.
        method: `"update"` or `"apply"`.
        kind: The class of the state.

    Returns:
        The leaves.

    Raises:
        TypeError: When the state is another transform's.
        ValueError: When structure, dtype or size do not match.
    """
    if type(state) is not kind:
        name = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        raise TypeError(
            f"jrc.scale_by_dgc: state must be {name}, got {type(state).__name__}. Start "
            "with state = tx.init(params), and give the state of a chain to the chain."
        )
    paths, treedef = jax.tree.flatten_with_path(gradients, is_leaf=is_placeholder)
    own = [leaf for _, leaf in paths]
    u, expected = jax.tree.flatten(state.u, is_leaf=is_placeholder)
    if treedef != expected:
        raise ValueError(
            "jrc.scale_by_dgc: gradients must have the structure of the parameters that init got, "
            f"got others: {tree_difference(state.u, gradients, is_placeholder)}. Build the state "
            "with tx.init for these parameters."
        )
    v = jax.tree.leaves(state.v, is_leaf=is_placeholder)
    velocity = jax.tree.leaves(state.velocity, is_leaf=is_placeholder)
    compressed = tuple(i for i, buffer in enumerate(u) if not is_placeholder(buffer))
    dense = tuple(
        i for i, buffer in enumerate(velocity) if not is_placeholder(buffer) and i not in compressed
    )
    for place in compressed:
        _check(*paths[place], u[place].shape, lambda gradient: (1, *gradient.shape))
    for place in dense:
        _check(*paths[place], velocity[place].shape, lambda gradient: gradient.shape)
    flat = None
    if params is not None or method == "apply":
        flat = _flat_params(params, own, treedef, method)
        if flat is None:
            raise _params_error(params, gradients, method)
    return Leaves(treedef, own, flat, state, u, v, velocity, compressed, dense)


def updates_of(leaves: Leaves, compressed: list[Array], dense: list[Array]) -> PyTree:
    """Return the tree of updates, in the shapes of the gradients and the dtypes of the parameters.

    Args:
        leaves: The leaves of the step.
        compressed: Directions of the compressed leaves.
        dense: Directions of the leaves on the dense path.

    Returns:
        Updates like the gradients; zeros for leaves without state.
    """
    like = leaves.gradients if leaves.params is None else leaves.params
    out: list[Any] = [
        None if place in leaves.floating else _zero_update(gradient, param)
        for place, (gradient, param) in enumerate(zip(leaves.gradients, like, strict=True))
    ]
    for places, directions in ((leaves.compressed, compressed), (leaves.dense, dense)):
        shaped = [
            direction.astype(jnp.result_type(param))
            for direction, param in zip(directions, pick(like, places), strict=True)
        ]
        out = put(out, places, shaped)
    return leaves.treedef.unflatten(out)


def _zero_update(gradient: Any, param: Any) -> Any:
    """Return the update of a leaf without state: zeros, or the placeholder itself."""
    if is_placeholder(gradient):
        return gradient
    dtype = gradient.dtype if is_placeholder(param) else jnp.result_type(param)
    # A float0 has no zeros that could be scaled or added.
    numeric = jnp.int32 if dtype == jax.dtypes.float0 else dtype
    return jnp.zeros(gradient.shape, numeric)


def _flat_params(params: PyTree, gradients: list[Any], treedef: Any, method: str) -> Any:
    """Return the parameters at the gradients' places, or `None` if they do not fit."""
    try:
        flat = treedef.flatten_up_to(params)
    except ValueError:
        return None
    for gradient, param in zip(gradients, flat, strict=True):
        if not is_placeholder(gradient):
            if jnp.shape(gradient) != jnp.shape(param):
                return None
        # `update` skips what has no gradient; `apply` returns parameters of the same structure.
        elif method == "apply" and type(gradient) is not type(param):
            return None
    return flat


def _params_error(params: PyTree, gradients: PyTree, method: str) -> ValueError:
    arrived = "None"
    if params is not None:
        arrived = tree_difference(gradients, params, is_placeholder) or _shape_difference(
            gradients, params
        )
    return ValueError(
        "jrc.scale_by_dgc: params must have the structure and shapes of the gradients, got "
        f"{arrived}. Call {method}(gradients, state, params)."
    )


def _shape_difference(gradients: PyTree, params: PyTree) -> str:
    """Return the first leaf whose shape is another, in words."""
    pairs = zip(named_leaves(gradients), named_leaves(params), strict=False)
    return next(
        (
            f"{jnp.shape(param)} at {name!r}, whose gradient has the shape {jnp.shape(gradient)}"
            for (name, gradient), (_, param) in pairs
            if jnp.shape(gradient) != jnp.shape(param)
        ),
        "others",
    )


def _check(
    path: Any, gradient: Any, kept: tuple[int, ...], shape_of: Callable[[Any], tuple[int, ...]]
) -> None:
    """Raise if a gradient, in the shape in which the state keeps it, cannot be added to it."""
    name = f"the gradient of {jax.tree_util.keystr(path) or 'the only leaf'}"
    dtype = getattr(gradient, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        arrived = gradient if is_placeholder(gradient) else dtype or type(gradient).__name__
        raise ValueError(
            f"jrc.scale_by_dgc: {name} must be a floating array like its parameter, got {arrived}. "
            "Freeze a parameter with optax.masked, from init on."
        )
    if shape_of(gradient) != kept:
        raise ValueError(
            f"jrc.scale_by_dgc: {name} must fit its state of shape {kept}, got "
            f"{shape_of(gradient)}. Build the state for these parameters, and under jax.shard_map "
            "pass it with the specs of jrc.dgc_specs(state, axis_name)."
        )


def served(gradients: PyTree, states: Sequence[DGCState]) -> PyTree:
    """Return which leaves of a gradient tree have momentum in any of these states.

    `optax.masked` and `optax.multi_transform` keep leaves from a transform, whole subtrees at once
    sometimes: these are `False` unless another state has them.

    Args:
        gradients: The tree of all gradients.
        states: The states of the transforms that see parts of it.

    Returns:
        The same tree of Booleans.
    """

    def by(state: DGCState) -> PyTree:
        def below(u: Any, velocity: Any, part: PyTree) -> PyTree:
            found = not (is_placeholder(u) and is_placeholder(velocity))
            return jax.tree.map(lambda _: found, part)

        return jax.tree.map(below, state.u, state.velocity, gradients, is_leaf=is_placeholder)

    nowhere = jax.tree.map(lambda _: False, gradients)
    return jax.tree.map(lambda *parts: any(parts), nowhere, *map(by, states))


def masked(leaves: Leaves, values: Sequence[Any]) -> list[Any]:
    """Return some leaves with all but those with state masked out."""
    own = set(leaves.floating)
    return [value if place in own else optax.MaskedNode() for place, value in enumerate(values)]
