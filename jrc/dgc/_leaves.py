"""The trees of one step, flattened once: everything behind works with lists of leaves."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrc._tree import named_leaves, tree_difference
from jrc._typing import PyTree
from jrc.dgc._state import DGCState, is_placeholder


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("gradient", "u", "v", "velocity", "target"),
    meta_fields=("place", "spec", "axes"),
)
@dataclasses.dataclass(frozen=True)
class Leaf:
    """One floating leaf of a step: what the step reads of it, and then what it returns.

    Attributes:
        gradient: This replica's own, in the leaf's shape; `None` after the step.
        u: Local velocity, with a row axis; `None` for a leaf on the dense path.
        v: Accumulated gradient likewise.
        velocity: Velocity on the dense path, in the leaf's shape.
        target: What the direction is added to, `None` for zeros. After the step the sum, float32.
        place: Number of the leaf in the flattened gradient tree, where `None` and masked-out leaves
            count.
        spec: How the leaf is split over axes that are not manual yet.
        axes: All axes along which its shards differ, manual ones included.
    """

    gradient: Any
    u: Any
    v: Any
    velocity: Any
    target: Any = None
    place: int = 0
    spec: PartitionSpec = PartitionSpec()
    axes: frozenset[str] = frozenset()

    @property
    def compressed(self) -> bool:
        """Whether the leaf is compressed; the others are on the dense path."""
        return self.u is not None

    def specs(self) -> "Leaf":
        """Return how the arrays of the leaf are split, with a spec in the place of each."""
        rows = PartitionSpec(None, *self.spec)
        arrays = {"gradient": self.spec, "u": rows, "v": rows}
        return dataclasses.replace(self, **arrays, velocity=self.spec, target=self.spec)


class Trees(NamedTuple):
    """The trees of a step, in the order of the gradient tree.

    Attributes:
        treedef: The structure that gradients and parameters share.
        gradients: This replica's gradients; integers, `None` and masked-out leaves among them.
        params: The parameters, `None` if there are none.
    """

    treedef: Any
    gradients: list[Any]
    params: list[Any] | None


def flatten(
    gradients: PyTree,
    state: DGCState,
    params: PyTree | None,
    method: str,
    kind: type[DGCState] = DGCState,
) -> tuple[Trees, list[Leaf]]:
    """Flatten the trees of a step and check that they belong together.

    Args:
        gradients: The tree given to `update` or `apply`.
        state: Made by `init` for parameters of the same structure.
        params: The parameters, if given.
        method: `"update"` or `"apply"`.
        kind: The class of the state.

    Returns:
        The trees, and their floating leaves.

    Raises:
        TypeError: When the state is another transform's.
        ValueError: When structure, dtype or size do not match.
    """
    if type(state) is not kind:
        name = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        raise TypeError(
            f"state must be {name}, got {type(state).__name__}. Start "
            "with state = tx.init(params), and give the state of a chain to the chain."
        )
    paths, treedef = jax.tree.flatten_with_path(gradients, is_leaf=is_placeholder)
    own = [leaf for _, leaf in paths]
    u, expected = jax.tree.flatten(state.u, is_leaf=is_placeholder)
    if treedef != expected:
        raise ValueError(
            "gradients must have the structure of the parameters that init got, "
            f"got others: {tree_difference(state.u, gradients, is_placeholder)}. Build the state "
            "with tx.init for these parameters."
        )
    rows = u, jax.tree.leaves(state.v, is_leaf=is_placeholder)
    kept = *rows, jax.tree.leaves(state.velocity, is_leaf=is_placeholder)
    leaves = []
    for place, arrays in enumerate(zip(*kept, strict=True)):
        leaf = Leaf(own[place], *(None if is_placeholder(x) else x for x in arrays), place=place)
        if leaf.compressed:
            _check(*paths[place], leaf.u.shape, lambda gradient: (1, *gradient.shape))
        elif leaf.velocity is not None:
            _check(*paths[place], leaf.velocity.shape, lambda gradient: gradient.shape)
        else:
            continue
        leaves.append(leaf)
    flat = None
    if params is not None or method == "apply":
        flat = _flat_params(params, own, treedef, method)
        if flat is None:
            raise _params_error(params, gradients, method)
    return Trees(treedef, own, flat), leaves


def updates_of(trees: Trees, leaves: Sequence[Leaf]) -> PyTree:
    """Return the tree of updates, in the shapes of the gradients and the dtypes of the parameters.

    Args:
        trees: The trees of the step.
        leaves: The floating leaves after it, whose targets are their updates.

    Returns:
        Updates like the gradients; zeros for leaves without state.
    """
    like = trees.gradients if trees.params is None else trees.params
    targets = {leaf.place: leaf.target for leaf in leaves}
    return trees.treedef.unflatten(
        targets[place].astype(jnp.result_type(param))
        if place in targets
        else _zero_update(gradient, param)
        for place, (gradient, param) in enumerate(zip(trees.gradients, like, strict=True))
    )


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
    call = "update(" if method == "update" else "jrc.dgc.apply_gradients(tx, "
    return ValueError(
        "params must have the structure and shapes of the gradients, got "
        f"{arrived}. Call {call}gradients, state, params)."
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
            f"{name} must be a floating array like its parameter, got {arrived}. "
            "Freeze a parameter with optax.masked, from init on."
        )
    if shape_of(gradient) != kept:
        raise ValueError(
            f"{name} must fit its state of shape {kept}, got "
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
