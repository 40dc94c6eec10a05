"""A neural ODE of diffrax, with its recursive checkpoint adjoint."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp

from tests.zoo.plain_transformers import drawn
from tests.zoo.program import Program, Remat


def diffrax_ode(toy: bool) -> Program:
    """A neural ODE of 32 steps of Tsit5 (toy: 8)."""
    steps, width, batch = (8, 8, 64) if toy else (32, 64, 512)
    field = eqx.nn.MLP(width, width, 2 * width, 2, jnp.tanh, key=jax.random.key(0))

    def build(remat: Remat, adjoint: Any = None) -> Any:
        def loss(field: Any, x: Any, target: Any) -> Any:
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: jax.vmap(field)(y)),
                diffrax.Tsit5(), t0=0.0, t1=1.0, dt0=1.0 / steps, y0=x, max_steps=steps + 1,
                adjoint=adjoint or diffrax.RecursiveCheckpointAdjoint(),
            )  # fmt: skip
            return jnp.mean((solution.ys[-1] - target) ** 2)

        return loss

    ways = {"direct adjoint": build(None, diffrax.DirectAdjoint())}
    args = (field, drawn(batch, width), drawn(batch, width, seed=1))
    return Program(build, args, by_hand=False, ways=ways)
