"""Solvers of jax_cfd, differentiated through their steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_cfd.base import equations, finite_differences, funcutils, grids, initial_conditions
from jax_cfd.spectral import equations as spectral_equations
from jax_cfd.spectral import time_stepping

from tests.zoo.program import Program, Remat, wrapped


def _repeated(step: Any, steps: int, remat: Remat) -> Any:
    return funcutils.repeated(wrapped(step, remat), steps)


def cfd_finite_volume(toy: bool) -> Program:
    """Semi-implicit Navier-Stokes, limiters of van Leer, 16 steps; each step checkpointed."""
    size, steps = (16, 2) if toy else (256, 16)
    grid = grids.Grid((size, size), domain=((0, 2 * np.pi), (0, 2 * np.pi)))
    start = initial_conditions.filtered_velocity_field(jax.random.key(0), grid, 7, 4)
    step = equations.semi_implicit_navier_stokes(1.0, 1e-3, 1e-3, grid)
    arrays = [u.array.data for u in start]

    def build(remat: Remat) -> Any:
        run = _repeated(step, steps, remat)

        def loss(arrays: Any) -> Any:
            velocity = tuple(
                grids.GridVariable(grids.GridArray(data, u.offset, grid), u.bc)
                for data, u in zip(arrays, start, strict=True)
            )
            return jnp.mean(finite_differences.curl_2d(run(velocity)).data ** 2)

        return loss

    return Program(build, (arrays,))


def cfd_spectral(toy: bool) -> Program:
    """Pseudo-spectral Navier-Stokes (crank_nicolson_rk4), 16 steps; each step checkpointed."""
    size, steps = (16, 2) if toy else (256, 16)
    grid = grids.Grid((size, size), domain=((0, 2 * np.pi), (0, 2 * np.pi)))
    equation = spectral_equations.NavierStokes2D(1e-3, grid, smooth=True)
    step = time_stepping.crank_nicolson_rk4(equation, 1e-3)
    vorticity = jax.random.normal(jax.random.key(0), (size, size))

    def build(remat: Remat) -> Any:
        run = _repeated(step, steps, remat)

        def loss(vorticity: Any) -> Any:
            return jnp.mean(jnp.fft.irfftn(run(jnp.fft.rfftn(vorticity))) ** 2)

        return loss

    return Program(build, (vorticity,))
