"""The formulas of momentum, momentum correction and factor masking, and of averaged gradients.

Source: Lin et al., "Deep Gradient Compression", arXiv:1712.01887, sections 3.1 and 3.2 and
appendix B. Averages: Fatkhullin, Tyurin and Richtarik, "Momentum Provably Improves Error
Feedback!", arXiv:2305.15155, algorithm 1.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jrc._typing import Array, Count, Float, Int, Real

AT: dict[str, Any] = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
"""How entries are written: each index once, indices outside of the leaf not at all."""

Row = Float[Array, "*shape"]
"""A float32 array of any shape; of one shape within a signature."""

Rows = Float[Array, "1 *shape"]
"""A float32 array with a row axis before the shape of its leaf, as the state keeps it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Momentum:
    """Momentum: `u <- m u + G`, moving by u; Nesterov: `u <- m (u + G)`, moving by `u + G`.

    Attributes:
        factor: m.
        use_nesterov: Whether the step looks ahead.
    """

    factor: Real | Array
    use_nesterov: bool = False

    def step(self, velocity: Row, gradient: Row) -> tuple[Row, Row]:
        """Return the new velocity and the direction to move in.

        Args:
            velocity: u, float32.
            gradient: G, float32, of the same shape.
        """
        if self.use_nesterov:
            velocity = self.factor * (velocity + gradient)
            return velocity, velocity + gradient
        velocity = self.factor * velocity + gradient
        return velocity, velocity

    def velocity_of(self, velocity: Row, direction: Row) -> Row:
        """Return the new velocity, from the old one and the direction of `step`.

        Momentum is linear, so this holds for the mean direction of replicas that share a velocity.
        Only the direction then has to cross the network, and it is equal on every replica.

        Args:
            velocity: u before the step, float32.
            direction: `u'` for `u' = m u + G`; Nesterov: `u' + G` for `u' = m (u + G)`.

        Returns:
            The direction; Nesterov: `m (u + direction) / (1 + m)`, with G eliminated.
        """
        if self.use_nesterov:
            return self.factor * (velocity + direction) / (1 + self.factor)
        return direction

    def correct(self, u: Rows, v: Rows, gradient: Rows, ok: Array) -> tuple[Rows, Rows]:
        """Return one step of momentum correction: `v <- v + u` (Nesterov: `v <- v + u + G`).

        The direction of momentum is accumulated in v, and not the gradient.

        Args:
            u: Local velocity, float32, as the state keeps it: with a row axis.
            v: Accumulated, unsent gradient, float32.
            gradient: G, local, float32.
            ok: Whether the step is taken, `bool[]`.

        Returns:
            The new u and v; the old ones where not `ok`.
        """
        # Selects and not products: 0 * NaN is NaN. Both are written over the old ones as long as v
        # is made from the new u: from the old one, XLA would copy it first.
        new = jnp.where(ok, self.step(u, gradient)[0], u)
        direction = new + gradient if self.use_nesterov else new
        return new, jnp.where(ok, v + direction, v)

    def weighted(self, gradient: Row, step: Count) -> Row:
        """Return what a gradient counts for on this step: itself."""
        del step
        return gradient


@dataclasses.dataclass(frozen=True, eq=False)
class Average:
    """An average `u <- u + rate (G - u)` in the place of momentum; it moves by its change.

    The change is accumulated in v. What is sent of v is added to an estimate, so that the mean of u
    over the replicas is that estimate and the mean of v.

    Attributes:
        rate: The share of a new gradient in the average.
    """

    rate: Real | Array

    def step(self, velocity: Row, gradient: Row) -> tuple[Row, Row]:
        """Return the new average and its change."""
        change = self.rate * (gradient - velocity)
        return velocity + change, change

    def velocity_of(self, velocity: Row, direction: Row) -> Row:
        """Return the new average, from the old one and its change."""
        return velocity + direction

    def correct(self, u: Rows, v: Rows, gradient: Rows, ok: Array) -> tuple[Rows, Rows]:
        """Return the new average, and v with its change; the old ones where not `ok`."""
        new, change = self.step(u, gradient)
        return jnp.where(ok, new, u), jnp.where(ok, v + change, v)

    def weighted(self, gradient: Row, step: Count) -> Row:
        """Return the gradient; the first so much larger that its average from zero is itself."""
        return gradient * jnp.where(step == 0, 1 / jnp.float32(self.rate), 1.0)


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
