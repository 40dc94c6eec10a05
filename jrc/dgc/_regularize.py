"""Regularization of local gradients, before they are accumulated."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jrc._errors import public
from jrc._typing import Array, PyTree, Real
from jrc._validate import scalar


@public("jrc.l2_penalty")
def l2_penalty(factor: Real | Array) -> optax.GradientTransformation:
    r"""Return a transform that adds the gradient of an L2 penalty to local gradients.

    $$G = g + \lambda w$$

    Args:
        factor: Lambda, a number that is not negative.

    Returns:
        An optax transform without state, for `regularization=`; a number there is the same.

    Raises:
        TypeError: When the factor is no number.
        ValueError: When it is negative or not finite. From `update`: without parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = l2_penalty(0.5)
        >>> w = jnp.array([2.0, 0.0, -4.0])
        >>> tx.update(jnp.ones(3), tx.init(w), w)[0].tolist()
        [2.0, 1.0, -1.0]

    Source: Lin et al., "Deep Gradient Compression", arXiv:1712.01887, section 3; Paddle's
    `L2Decay`.
    """
    return _penalty(_checked(factor), lambda w: w)


@public("jrc.l1_penalty")
def l1_penalty(factor: Real | Array) -> optax.GradientTransformation:
    r"""Return a transform that adds the gradient of an L1 penalty to local gradients.

    $$G = g + \lambda \operatorname{sign}(w)$$

    Args:
        factor: Lambda, a number that is not negative.

    Returns:
        An optax transform without state, for `regularization=`.

    Raises:
        TypeError: When the factor is no number.
        ValueError: When it is negative or not finite. From `update`: without parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = l1_penalty(0.5)
        >>> w = jnp.array([2.0, 0.0, -4.0])
        >>> tx.update(jnp.ones(3), tx.init(w), w)[0].tolist()
        [1.5, 1.0, 0.5]

    Source: Paddle's `L1Decay`.
    """
    return _penalty(_checked(factor), jnp.sign)


def _penalty(factor: Real | Array, slope: Callable[[Array], Array]) -> optax.GradientTransformation:
    """Return the transform `G = g + factor * slope(w)`."""

    @public("jrc.scale_by_dgc")
    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        if params is None:
            raise ValueError(
                "params must be given where there is a regularization, got None. "
                "Call update(gradients, state, params)."
            )
        added = jax.tree.map(lambda g, w: g + factor * slope(w.astype(g.dtype)), updates, params)
        return added, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def _checked(factor: Real | Array) -> Real | Array:
    return scalar(factor, "factor", rule=">= 0", holds=lambda x: x >= 0, remedy="Pass 1e-4.")


def check_stateless(regularization: optax.GradientTransformation, params: PyTree) -> None:
    """Raise if a regularization has state: `DGCState` has no field to keep it in.

    Args:
        regularization: Any optax transform.
        params: The parameters that `init` gets.

    Raises:
        TypeError: When its state holds arrays.
    """
    kept = jax.eval_shape(regularization.init, params)
    if jax.tree.leaves(kept):
        raise TypeError(
            "regularization must be a transform without state, got one with the "
            f"state {type(kept).__name__}. Chain it in front: "
            "optax.chain(regularization, jrc.scale_by_dgc(...))."
        )
