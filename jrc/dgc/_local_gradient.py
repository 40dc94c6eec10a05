"""What happens to a gradient on its own replica: float32, clipping, regularisation."""

import jax.numpy as jnp

from jrc._tree import sum_dtype
from jrc._typing import Count, PyTree
from jrc.dgc._clip import clip_factor
from jrc.dgc._config import Options
from jrc.dgc._leaves import Slots, only, pick, put


def local_gradients(
    gradients: PyTree,
    params: PyTree | None,
    slots: Slots,
    step: Count,
    replicas: int,
    options: Options,
) -> PyTree:
    """The gradients that enter the momentum: `G = clip(g) + lam w`, float32.

    Args:
        gradients: As they arrived.
        params: Needed by most regularisations.
        slots: The leaves with state; those that are compressed are clipped.
        step: Update counter; nothing is clipped before the ramp-up begins, unless asked for.
        replicas: N, which sets the bound of the norm.
        options: Clipping and regularisation.

    Returns:
        The same tree, leaves without state masked out.
    """
    local = _as_float32(only(gradients, slots.floating), slots)
    if (max_norm := options.local_grad_clip_norm) is not None:
        clips = options.clip_before_rampup | (step >= options.rampup_begin_step)
        scaling = options.clip_scaling
        clipped = [
            gradient * jnp.where(clips, clip_factor(gradient, max_norm, replicas, scaling), 1.0)
            for gradient in pick(local, slots.compressed)
        ]
        local = _as_float32(put(local, slots.compressed, clipped), slots)
    transform = options.regularization
    if transform is None:
        return local
    shown = None if params is None else _as_wide(only(params, slots.floating), slots)
    # A float64 factor, or parameters of it, would make the state float64.
    return _as_float32(transform.update(local, transform.init(local), shown)[0], slots)


def _as_wide(params: PyTree, slots: Slots) -> PyTree:
    wide = [jnp.asarray(x) for x in pick(params, slots.floating)]
    return put(params, slots.floating, [x.astype(sum_dtype(x.dtype)) for x in wide])


def _as_float32(local: PyTree, slots: Slots) -> PyTree:
    wide = [gradient.astype(jnp.float32) for gradient in pick(local, slots.floating)]
    return put(local, slots.floating, wide)
