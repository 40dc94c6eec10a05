"""The formulas of momentum, momentum correction and factor masking, and of averaged gradients.

Source: Lin et al., "Deep Gradient Compression", arXiv:1712.01887, sections 3.1 and 3.2 and
appendix B. Averages: Fatkhullin, Tyurin and Richtarik, "Momentum Provably Improves Error
Feedback!", arXiv:2305.15155, algorithm 1.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jrc._typing import Array, Float, Int, Real

AT: dict[str, Any] = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
"""How entries are written: each index once, indices outside of the leaf not at all."""


class Momentum(NamedTuple):
    """The factor m, and whether the step looks ahead (Nesterov)."""

    factor: Real | Array
    use_nesterov: bool


class Average(NamedTuple):
    """The share of a new gradient in an average, `u <- u + rate (G - u)`; it moves by its change.

    The change is accumulated in v. What is sent of v is added to an estimate, so that the mean of u
    over the replicas is that estimate and the mean of v.
    """

    rate: Real | Array


Row = Float[Array, "*shape"]
"""A float32 array of any shape; of one shape within a signature."""

Rows = Float[Array, "1 *shape"]
"""A float32 array with a row axis before the shape of its leaf, as the state keeps it."""


def momentum_step(velocity: Row, gradient: Row, momentum: Momentum | Average) -> tuple[Row, Row]:
    """Return one step of momentum: `u <- m u + G`; Nesterov: `u <- m (u + G)`, moving by `u + G`.

    An average moves by its own change.

    Args:
        velocity: u, float32.
        gradient: G, float32, of the same shape.
        momentum: m and its form.

    Returns:
        The new velocity and the direction to move in.
    """
    if isinstance(momentum, Average):
        change = momentum.rate * (gradient - velocity)
        return velocity + change, change
    if momentum.use_nesterov:
        velocity = momentum.factor * (velocity + gradient)
        return velocity, velocity + gradient
    velocity = momentum.factor * velocity + gradient
    return velocity, velocity


def velocity_of_direction(velocity: Row, direction: Row, momentum: Momentum | Average) -> Row:
    """Return the new velocity, from the old one and the direction of `momentum_step`.

    Momentum is linear, so this holds for the mean direction of replicas that share a velocity.
    Only the direction then has to cross the network, and it is equal on every replica.

    Args:
        velocity: u before the step, float32.
        direction: `u'` for `u' = m u + G`; Nesterov: `u' + G` for `u' = m (u + G)`; of an average
            its change.
        momentum: m and its form.

    Returns:
        The velocity after the step; Nesterov: `m (u + direction) / (1 + m)`, with G eliminated.
    """
    if isinstance(momentum, Average):
        return velocity + direction
    if momentum.use_nesterov:
        return momentum.factor * (velocity + direction) / (1 + momentum.factor)
    return direction


def corrected_step(
    u: Rows,
    v: Rows,
    gradient: Rows,
    momentum: Momentum | Average,
    ok: Array,
) -> tuple[Rows, Rows]:
    """Return one step of momentum correction: `v <- v + u` (Nesterov: `v <- v + u + G`).

    The direction of momentum is accumulated in v, and not the gradient.

    Args:
        u: Local velocity, float32, as the state keeps it: with a row axis.
        v: Accumulated, unsent gradient, float32.
        gradient: G, local, float32.
        momentum: m and its form.
        ok: Whether the step is taken, `bool[]`.

    Returns:
        The new u and v; the old ones where not `ok`.
    """
    if isinstance(momentum, Average):
        new, change = momentum_step(u, gradient, momentum)
        return jnp.where(ok, new, u), jnp.where(ok, v + change, v)
    # Selects and not products: 0 * NaN is NaN. Both are written over the old ones as long as v is
    # made from the new u: from the old one, XLA would copy it first.
    new = jnp.where(ok, momentum_step(u, gradient, momentum)[0], u)
    direction = new + gradient if momentum.use_nesterov else new
    return new, jnp.where(ok, v + direction, v)


def factor_masked(u: Rows, sent: Array) -> Rows:
    """Return the velocity with zeros where `sent: bool[1, *shape]` is true: factor masking."""
    return jnp.where(sent, 0.0, u)


def factor_masked_at(u: Rows, indices: Int[Array, " k"]) -> Rows:
    """Return the velocity with zeros at the flat indices that were sent: factor masking."""
    return u.at[places_in(u, indices)].set(0.0, **AT)


def places_in(rows: Rows, indices: Int[Array, " k"]) -> tuple[Any, ...]:
    """Return the index of each entry in its leaf's own shape, in the only row.

    XLA copies an array that is reshaped, and does not write over it in place.

    Args:
        rows: A leaf with a row axis.
        indices: Flat ones; those outside of the leaf, negative ones too, stay outside.

    Returns:
        What `rows.at[...]` takes.

    >>> row, *where = places_in(jnp.ones((1, 2, 3)), jnp.array([4, 6, -1]))
    >>> row, [x.tolist() for x in where]
    (0, [[1, 2, -1], [1, 0, 2]])
    """
    if rows.ndim == 1:
        return (indices,)
    out: list[Any] = []
    for size in rows.shape[:1:-1]:
        out.append(jnp.remainder(indices, size))
        indices = jnp.floor_divide(indices, size)
    return (0, indices, *out[::-1])
