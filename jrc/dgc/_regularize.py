"""Regularisation of local gradients, before they are accumulated."""

import jax
import optax

from jrc._typing import Array, PyTree


def l2_penalty(factor: float | Array) -> optax.GradientTransformation:
    """The gradient of an L2 penalty, added: `G = g + factor * w`.

    Args:
        factor: a number.

    Returns:
        A transform without state.
    """

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        if params is None:
            raise ValueError(
                "jrc.scale_by_dgc: regularization needs the parameters, and update got none; "
                "call update(gradients, state, params)"
            )
        return jax.tree.map(lambda g, w: g + factor * w.astype(g.dtype), updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def check_stateless(regularization: optax.GradientTransformation, params: PyTree) -> None:
    """That a regularisation has nothing to remember, for there is no place to keep it.

    Args:
        regularization: Any optax transform.
        params: What init is called with.

    Raises:
        TypeError: When its state holds arrays.
    """
    kept = jax.eval_shape(regularization.init, params)
    if jax.tree.leaves(kept):
        raise TypeError(
            "jrc.scale_by_dgc: regularization must be a transform without state, got one that "
            f"keeps {type(kept).__name__}; chain it before: "
            "optax.chain(regularization, scale_by_dgc(...))"
        )
