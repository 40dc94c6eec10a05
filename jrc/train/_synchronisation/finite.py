"""What a value that is not finite on one replica does, in a step and in a round.

- A mean of gradients has it on every replica, as in any step of JAX; nothing is skipped, and
  `optax.apply_if_finite` acts on all replicas alike.
- With compressed gradients all replicas skip the step, model state included (`gradients_are`): what
  a replica keeps back would have the value for ever. A compression itself skips its own update
  likewise (`finite_everywhere` in `jrc.dgc`): a transform before it, its mean over the inner axis
  or its regularization may have made an infinity of gradients that were finite.
- In a round the replica does not take its inner step (`inner_step_is`), and its contribution to the
  next exchange of each fragment is left out on all (`contribution_is`). If none is left, nothing
  changes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jrc._layout import Layout
from jrc._tree import all_finite
from jrc._typing import Array, PyTree
from jrc.train._synchronisation.replicas import Replicas


def gradients_are(grads: PyTree, over: Replicas) -> Array:
    """Whether gradients are finite on every replica, so that all take the same branch."""
    return over.total((~all_finite(grads)).astype(jnp.int32)) == 0


def inner_step_is(loss: Any, params: PyTree, old_model: PyTree, model_state: PyTree) -> Array:
    """Whether a replica's own step left everything finite that was.

    The new parameters, not the gradients: the user's chain may repair a gradient. A float of the
    model state may have been infinite or NaN before.
    """
    pairs = zip(jax.tree.leaves(old_model), jax.tree.leaves(model_state), strict=True)
    floats = [(x, y) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.inexact)]
    stays = [(jnp.isfinite(y) | ~jnp.isfinite(x)).all() for x, y in floats]
    return jnp.isfinite(loss) & all_finite(params) & jnp.stack([True, *stays]).all()


def contribution_is(difference: PyTree, failed: Array, layout: Layout) -> Array:
    """Whether a replica's contribution counts, on all its devices or on none.

    Args:
        difference: What a device would send.
        failed: For how many exchanges to come a step is left out.
        layout: How the replica is split.
    """
    bad = (~all_finite(difference)).astype(jnp.int32)
    bad = jax.lax.psum(bad, layout.inside) if layout.inside else bad
    return (failed == 0) & (bad == 0)


def chosen(ok: Array, new: PyTree, old: PyTree) -> PyTree:
    """Return the new values, or the old ones where something was not finite."""
    return jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, old)
