"""Simulations and potentials of jax_md."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax_md import energy, partition, quantity, simulate, space

from tests.zoo.program import Program, Remat, wrapped


def _lattice(side: int, spacing: float) -> jax.Array:
    points = np.stack(np.meshgrid(*[np.arange(side)] * 3), -1).reshape(-1, 3)
    noise = np.random.default_rng(0).standard_normal(points.shape)
    return jnp.asarray(spacing * (points + 0.05 * noise), jnp.float32)


def md_simulation(toy: bool) -> Program:
    """Lennard-Jones, NVE, neighbour lists updated in each of 32 steps; steps checkpointed."""
    side, steps = (4, 2) if toy else (12, 32)
    positions, box = _lattice(side, 1.2), 1.2 * side
    displacement, shift = space.periodic(box)
    neighbors, potential = energy.lennard_jones_neighbor_list(
        displacement, box, r_cutoff=1.8, r_onset=1.5, dr_threshold=0.3, format=partition.Dense,
    )  # fmt: skip
    start = neighbors.allocate(positions, extra_capacity=8)

    def build(remat: Remat) -> Any:
        def loss(positions: Any, start: Any) -> Any:
            init, apply = simulate.nve(potential, shift, 1e-3)
            state = init(jax.random.key(0), positions, kT=0.5, neighbor=start)

            def step(carry: Any, _: Any) -> Any:
                state, list_ = carry
                list_ = list_.update(state.position)
                return (apply(state, neighbor=list_), list_), None

            end = jax.lax.scan(wrapped(step, remat), (state, start), None, length=steps)[0][0]
            return jnp.mean(end.momentum**2)

        return loss

    return Program(build, (positions, start))


def md_behler_parrinello(toy: bool) -> Program:
    """Energies and forces of a Behler-Parrinello network, matched over structures in a vmap."""
    side, batch = (3, 2) if toy else (4, 8)
    positions, box = _lattice(side, 2.0), 2.0 * side
    displacement, _ = space.periodic(box)
    species = jnp.asarray(np.arange(len(positions)) % 2)
    key = jax.random.key(0)
    potential = energy.behler_parrinello(displacement, key=key, species=species)
    graph, params = nnx.split(potential.model)
    draw = np.random.default_rng(1).standard_normal((batch, *positions.shape))
    many = positions + jnp.asarray(0.05 * draw, jnp.float32)
    wanted = jnp.asarray(draw[::-1], jnp.float32)

    def build(remat: Remat) -> Any:
        def of_one(params: Any, at: Any) -> Any:
            model = nnx.merge(graph, params)
            return model(at), quantity.force(model)(at)

        each = wrapped(of_one, remat)

        def loss(params: Any, many: Any, wanted: Any) -> Any:
            energies, forces = jax.vmap(each, (None, 0))(params, many)
            return jnp.mean(energies**2) + jnp.mean((forces - wanted) ** 2)

        return loss

    return Program(build, (params, many, wanted))


def nequip_forces(toy: bool) -> Program:
    """Force matching of NequIP (e3nn-jax) from jax_md's package; convolutions checkpointed."""
    from jax_md._nn import nequip

    side = 3 if toy else 5
    positions, box = _lattice(side, 2.5), 2.5 * side
    displacement, _ = space.periodic(box)
    config = nequip.default_config()
    config.unlock()
    config.update(
        shift=0.0,
        scale=1.0,
        n_elements=2,
        graph_net_steps=2 if toy else 4,
        r_max=3.0,
        n_neighbors=6.0,
    )
    config.hidden_irreps = "4x0e + 2x1e" if toy else "32x0e + 16x1e + 4x2e"
    atoms = jax.nn.one_hot(jnp.asarray(np.arange(len(positions)) % 2), 2)
    neighbors, init, potential = energy.nequip_neighbor_list(displacement, box, config, atoms)
    found = neighbors.allocate(positions)
    params = init(jax.random.key(0), positions, found)
    wanted = jnp.asarray(np.random.default_rng(1).standard_normal(positions.shape), jnp.float32)

    def build(remat: Remat) -> Any:
        of = wrapped(lambda params, at, found: potential(params, at, found), remat)

        def loss(params: Any, positions: Any, found: Any, wanted: Any) -> Any:
            value, gradient = jax.value_and_grad(of, 1)(params, positions, found)
            return jnp.mean((gradient + wanted) ** 2) + 1e-3 * value**2

        return loss

    return Program(build, (params, positions, found, wanted))
