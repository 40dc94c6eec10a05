"""What happens to a gradient on its own replica: float32, clipping, regularization."""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from jrc._tree import sum_dtype
from jrc._typing import Array, PyTree
from jrc.dgc._clip import clip_factor
from jrc.dgc._collectives import dense_mean
from jrc.dgc._config import DGCConfig, Number
from jrc.dgc._leaves import Leaves, masked, pick, put
from jrc.dgc._state import is_placeholder


def local_gradients(
    leaves: Leaves, axes: Sequence[Collection[str]], replicas: int, config: DGCConfig
) -> list[Any]:
    """Return the gradients that enter the momentum: `G = clip(g) + lambda w`, float32.

    Args:
        leaves: The leaves of the step; those that are compressed are clipped.
        axes: For each leaf the manual axes over which it is split.
        replicas: N, which sets the bound of the norm.
        config: Inner axis, clipping and regularization. Nothing is clipped before
            `rampup_begin_step` unless `clip_before_rampup`.

    Returns:
        One for each leaf; leaves without state are masked out.
    """
    local = masked(leaves, leaves.gradients)
    if config.inner_axis is not None:
        wide = _as_float32(pick(local, leaves.floating))
        local = put(local, leaves.floating, dense_mean(wide, config.inner_axis))
    local = put(local, leaves.floating, _as_float32(pick(local, leaves.floating)))
    if (bound := config.local_grad_clip_norm) is not None:
        clipped = _clipped(leaves, local, axes, bound, replicas, config)
        local = put(local, leaves.compressed, _as_float32(clipped))
    if config.regularization is None:
        return local
    # A float64 factor, or parameters of it, would make the state float64.
    regularized = _regularized(leaves, local, config)
    return put(local, leaves.floating, _as_float32(pick(regularized, leaves.floating)))


def _clipped(
    leaves: Leaves,
    local: list[Any],
    axes: Sequence[Collection[str]],
    bound: Number,
    replicas: int,
    config: DGCConfig,
) -> list[Array]:
    """Return the compressed leaves' gradients after clipping."""
    clips = config.clip_before_rampup | (leaves.state.step >= config.rampup_begin_step)

    def factor(place: int) -> Array:
        split = sorted(axes[place])
        return clip_factor(local[place], bound, replicas, config.clip_scaling, split)

    return [local[place] * jnp.where(clips, factor(place), 1.0) for place in leaves.compressed]


def _regularized(leaves: Leaves, local: list[Any], config: DGCConfig) -> list[Any]:
    """Return the gradients after the user's transform, which takes trees and not lists."""
    transform, tree = config.regularization, leaves.treedef.unflatten(local)
    params: PyTree | None = None
    if leaves.params is not None:
        params = leaves.treedef.unflatten([_wide(x) for x in masked(leaves, leaves.params)])
    updates, _ = transform.update(tree, transform.init(tree), params)
    return leaves.treedef.flatten_up_to(updates)


def _wide(param: Any) -> Any:
    """Return a parameter in a dtype to add up in."""
    if is_placeholder(param):
        return param
    array = jnp.asarray(param)
    return array.astype(sum_dtype(array.dtype))


def _as_float32(gradients: list[Any]) -> list[Array]:
    return [gradient.astype(jnp.float32) for gradient in gradients]
