"""The dynamical core of dinosaur: the primitive equations on a sphere, differentiated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dinosaur import (
    coordinate_systems,
    primitive_equations,
    primitive_equations_states,
    scales,
    sigma_coordinates,
    spherical_harmonic,
    time_integration,
    units,
    xarray_utils,
)

from tests.zoo.program import Program, Remat, wrapped


def dinosaur_weather(toy: bool) -> Program:
    """Dry primitive equations (imex_rk_sil3), 24 steps; nested_checkpoint_scan by its authors."""
    waves, layers, lengths = (10, 2, (2, 2)) if toy else (21, 8, (4, 6))
    coords = coordinate_systems.CoordinateSystem(
        spherical_harmonic.Grid.with_wavenumbers(longitude_wavenumbers=waves + 1),
        sigma_coordinates.SigmaCoordinates.equidistant(layers),
    )
    physics = units.SimUnits.from_si()
    initial, features = primitive_equations_states.steady_state_jw(coords, physics)
    state = initial() + primitive_equations_states.baroclinic_perturbation_jw(coords, physics)
    equation = primitive_equations.PrimitiveEquationsSigma(
        features[xarray_utils.REF_TEMP_KEY],
        np.zeros(coords.horizontal.modal_shape, np.float32),
        coords,
        physics,
    )
    minutes = physics.nondimensionalize(30 * scales.units.minute)
    step = time_integration.imex_rk_sil3(equation, time_step=minutes)
    steps = int(np.prod(lengths))

    def with_scan(run: Any, scan: Any) -> Any:
        def loss(state: Any) -> Any:
            end = time_integration.repeated(run, steps, scan)(state)
            return jnp.mean(coords.horizontal.to_nodal(end.vorticity) ** 2)

        return loss

    def build(remat: Remat) -> Any:
        return with_scan(wrapped(step, remat), jax.lax.scan)

    nested = functools.partial(time_integration.nested_checkpoint_scan, nested_lengths=lengths)
    twice = functools.partial(nested, nested_lengths=(*lengths, 1))
    ways = {
        "authors: nested scan": with_scan(step, nested),
        "authors: nested scan, steps too": with_scan(step, twice),
    }
    return Program(build, (jax.tree.map(jnp.asarray, state),), ways=ways)
