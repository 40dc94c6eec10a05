"""What enters the momentum: local gradients after the inner mean, clipping and regularization."""

import dataclasses

import jax.numpy as jnp
import optax

from jrc._mesh_axes import bound_axes
from jrc._tree import sum_dtype
from jrc._typing import Array, Count, PyTree
from jrc.dgc._clip import clip_factor
from jrc.dgc._collectives import dense_mean, is_already_reduced
from jrc.dgc._config import DGCConfig
from jrc.dgc._leaves import Leaf, Trees


def local_gradients(
    trees: Trees, leaves: list[Leaf], now: Count, replicas: int, config: DGCConfig
) -> list[Leaf]:
    """Return the leaves with what enters the momentum: `G = clip(g) + lambda w`, float32.

    Compressed leaves are clipped, before `rampup_begin_step` only with `clip_before_rampup`.
    """
    _check_local(leaves, config)
    local = [leaf.gradient.astype(jnp.float32) for leaf in leaves]
    if config.inner_axis is not None:
        local = dense_mean(local, config.inner_axis)
    if (bound := config.local_grad_clip_norm) is not None:
        clips = config.clip_before_rampup | (now >= config.rampup_begin_step)
        manual = set(bound_axes(config.axis))
        for i, leaf in enumerate(leaves):
            if leaf.compressed:
                given = local[i], bound, replicas, config.clip_scaling, sorted(leaf.axes & manual)
                local[i] = local[i] * jnp.where(clips, clip_factor(*given), 1.0)
    if config.regularization is not None:
        local = _regularized(trees, leaves, local, config.regularization)
    # A float64 bound or factor, or parameters of it, would make the state float64.
    local = [config.momentum.weighted(x.astype(jnp.float32), now) for x in local]
    return [dataclasses.replace(leaf, gradient=x) for leaf, x in zip(leaves, local, strict=True)]


def _regularized(
    trees: Trees, leaves: list[Leaf], local: list[Array], transform: optax.GradientTransformation
) -> list[Array]:
    """Return the gradients after the user's transform, which takes trees and not lists."""
    places = [leaf.place for leaf in leaves]

    def tree_of(arrays: list[Array]) -> PyTree:
        own = dict(zip(places, arrays, strict=True))
        masked = optax.MaskedNode()
        return trees.treedef.unflatten(own.get(i, masked) for i in range(len(trees.gradients)))

    params = None
    if trees.params is not None:
        arrays = [jnp.asarray(trees.params[place]) for place in places]
        params = tree_of([x.astype(sum_dtype(x.dtype)) for x in arrays])
    tree = tree_of(local)
    updates, _ = transform.update(tree, transform.init(tree), params)
    found = trees.treedef.flatten_up_to(updates)
    return [found[place] for place in places]


def _check_local(leaves: list[Leaf], config: DGCConfig) -> None:
    """Raise if gradients were summed over an axis before."""
    for axis in (config.axis, config.inner_axis):
        if any(is_already_reduced(leaf.gradient, axis) for leaf in leaves):
            raise ValueError(
                "gradients must be local to each replica, got ones that are "
                f"equal along axis {axis!r}: jax.grad with respect to replicated parameters sums "
                "them, and compression would save nothing. "
                f'Call jax.lax.pcast(params, {axis!r}, to="varying") before jax.grad.'
            )
