"""Momentum, and its correction for gradients that are sent late."""

from typing import NamedTuple

import jax.numpy as jnp

from jrc._typing import Array, Float


class Decay(NamedTuple):
    """How velocity fades: the momentum, and whether it looks ahead."""

    momentum: float | Array
    use_nesterov: bool


def momentum_step(velocity: Array, gradient: Array, decay: Decay) -> tuple[Array, Array]:
    """One step of momentum: `u <- m u + G`; Nesterov: `u <- m (u + G)`, moving by `u + G`.

    Args:
        velocity: u, float32.
        gradient: G, float32, of the same shape.
        decay: Momentum and its form.

    Returns:
        The new velocity and the direction to move in.
    """
    if decay.use_nesterov:
        velocity = decay.momentum * (velocity + gradient)
        return velocity, velocity + gradient
    velocity = decay.momentum * velocity + gradient
    return velocity, velocity


def velocity_behind(velocity: Array, direction: Array, decay: Decay) -> Array:
    """The new velocity, from the old one and the direction that `momentum_step` took.

    Momentum is linear, so this holds for the mean direction of replicas that share a velocity.
    Only the direction then has to cross the wire, and is known to be the same everywhere.

    Args:
        velocity: u before the step, float32.
        direction: `u'` for `u' = m u + G`; Nesterov: `u' + G` for `u' = m (u + G)`.
        decay: Momentum and its form.

    Returns:
        U after the step; Nesterov: `m (u + direction) / (1 + m)`, with G eliminated.
    """
    if decay.use_nesterov:
        return decay.momentum * (velocity + direction) / (1 + decay.momentum)
    return direction


def corrected_step(
    u: Float[Array, "1 n"],
    v: Float[Array, "1 n"],
    gradient: Float[Array, "1 n"],
    decay: Decay,
    ok: Array,
) -> tuple[Float[Array, "1 n"], Float[Array, "1 n"]]:
    """Momentum correction: the direction is accumulated, `v <- v + u` (Nesterov: `+ u + G`).

    Args:
        u: Local velocity, float32, as the state keeps it: a row.
        v: Accumulated, unsent gradient, float32.
        gradient: G, local, float32.
        decay: Momentum and its form.
        ok: Whether the gradients of all replicas are finite.

    Returns:
        The new u and v; the old ones where not `ok`.

    Source: Lin et al., "Deep Gradient Compression", arXiv:1712.01887, section 3.1 and appendix B.
    """
    # Selects and not products: 0 * NaN is NaN. Both are written over the old ones as long as v is
    # made from the new u: from the old one, XLA would copy it first.
    moved = jnp.where(ok, momentum_step(u, gradient, decay)[0], u)
    direction = moved + gradient if decay.use_nesterov else moved
    return moved, jnp.where(ok, v + direction, v)
