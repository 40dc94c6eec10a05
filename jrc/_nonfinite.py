"""What a NaN or an infinity on one replica does: the one place that stops it.

- A mean of gradients has it on every replica, as in any step of JAX; nothing is skipped, and
  `optax.apply_if_finite` acts on all replicas alike.
- With compressed gradients all replicas skip the step, model state included: what a replica keeps
  back would have the value for ever. `train` asks `finite_everywhere` of the gradients before it
  calls the optimizer, so that the whole chain skips; a compression asks once more of what enters
  its momentum (`dgc._update`): a transform before it, its mean over the inner axis or its
  regularization may have made an infinity of gradients that were finite.
- In a round the replica does not take its inner step (`stays_finite`), and its contribution to the
  next exchange of each fragment is left out on all. If none is left, nothing changes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrc._mesh_axes import is_tracked, varies
from jrc._tree import all_finite
from jrc._typing import Array, PyTree


def finite_everywhere(tree: PyTree, axes: Sequence[str]) -> Array:
    """Whether every floating entry is finite on every device of these axes, `bool[]`.

    One scalar all-reduce: the devices take a step together or not at all.
    """
    if not jax.tree.leaves(tree):
        return jnp.bool_(True)
    bad = (~all_finite(tree)).astype(jnp.int32)
    # What types say is equal along an axis cannot be added up over it, and need not be.
    over = tuple(axis for axis in axes if varies(bad, axis) or not is_tracked(axis))
    return (lax.psum(bad, over) if over else bad) == 0


def stays_finite(loss: Any, params: PyTree, old_model: PyTree, model_state: PyTree) -> Array:
    """Whether a replica's own step left everything finite that was.

    The new parameters, not the gradients: the user's chain may repair a gradient. A float of the
    model state may have been infinite or NaN before.
    """
    pairs = zip(jax.tree.leaves(old_model), jax.tree.leaves(model_state), strict=True)
    floats = [(x, y) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.inexact)]
    stays = [(jnp.isfinite(y) | ~jnp.isfinite(x)).all() for x, y in floats]
    return jnp.isfinite(loss) & all_finite(params) & jnp.stack([True, *stays]).all()


def chosen[Tree](ok: Array, new: Tree, old: Tree) -> Tree:
    """Return the new values, or the old ones where something was not finite."""
    return jax.tree.map(lambda x, y: x if x is y else jnp.where(ok, x, y), new, old)
