"""Scatters of one entry of each row: equal results by position, and no other scatter changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jrc._jaxpr import evaluate, inlined_program, primitive_name
from jrc._jaxpr.picked_entries import with_entries_by_position

LABELS = jnp.array([0, 4, -1, 3, 2, 7, -9, 6])
NUMBERS = jnp.cos(jnp.arange(8.0))


def program_of(function, *args):
    return inlined_program(jax.make_jaxpr(function)(*args))


def scattered(program):
    return [eqn for eqn in program.eqns if primitive_name(eqn).startswith("scatter")]


def onto_rows(mode, dtype=jnp.float32, shape=(8, 7)):
    def run(labels, numbers):
        zeros = jnp.zeros(shape, dtype)
        rows = jnp.arange(shape[0])
        return zeros.at[rows, labels].add(numbers.astype(dtype), mode=mode)

    return run


def gradient(of, shape):
    def run(labels, numbers):
        x = jnp.ones(shape)
        return jax.vjp(lambda x: of(x, labels), x)[1](numbers)[0]

    return run


def take(axis, shape):
    def of(x, labels):
        return jnp.take_along_axis(x, jnp.expand_dims(labels, axis), axis).reshape(-1)

    return gradient(of, shape)


def windows(labels, numbers):
    """A row of three for each: the index says which of the seven."""

    def of(x):
        return jax.vmap(lambda x, i: jnp.take(x, i, axis=1))(x, labels)

    updates = jnp.outer(numbers, jnp.arange(1.0, 4))
    return jax.vjp(of, jnp.ones((8, 3, 7)))[1](updates)[0]


BY_POSITION = {
    "along rows": take(1, (8, 7)),
    "along columns": take(0, (7, 8)),
    "windows": windows,
    "indices outside are dropped": onto_rows("drop"),
    "indices outside fill": onto_rows("fill"),
    "indices outside are clipped": onto_rows("clip"),
    "bfloat16": onto_rows(None, jnp.bfloat16),
    "integers": onto_rows(None, jnp.int32),
    "mapped": lambda labels, numbers: jax.vmap(onto_rows("drop"), (0, None))(
        jnp.stack([labels, labels[::-1]]), numbers
    ),
    "short indices": lambda labels, numbers: take(1, (8, 200))(labels.astype(jnp.int8), numbers),
    "indices that are shorter than rows": lambda labels, numbers: take(1, (8, 300))(
        abs(labels).astype(jnp.uint8), numbers
    ),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_entries_by_position_are_those_of_a_scatter(name):
    program = program_of(BY_POSITION[name], LABELS, NUMBERS)
    new = with_entries_by_position(program)
    assert scattered(program) and not scattered(new)
    found, expected = (evaluate(each.jaxpr)(LABELS, NUMBERS)[0] for each in (new, program))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


AS_THEY_ARE = {
    "onto a value": lambda labels, numbers: jnp.ones((8, 7)).at[jnp.arange(8), labels].add(numbers),
    "onto ones by a product": lambda labels, numbers: (
        jnp.ones((8, 7)).at[jnp.arange(8), labels].multiply(numbers)
    ),
    "sums by segments": lambda labels, numbers: jnp.zeros(7).at[labels].add(numbers),
    "several of each row": lambda labels, numbers: (
        jnp.zeros((8, 7)).at[jnp.arange(8)[:, None], labels[None]].add(jnp.outer(numbers, numbers))
    ),
    "slices of a row": lambda labels, numbers: jax.vmap(
        lambda z, i, x: lax.dynamic_update_slice(z, x[None] * jnp.ones(2), (i,)),
    )(jnp.zeros((8, 7)), labels, numbers),
    "one of all": lambda labels, numbers: (
        jnp.zeros((8, 7)).at[labels[0], labels[1]].add(numbers[0])
    ),
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_other_scatters_stay(name):
    program = program_of(AS_THEY_ARE[name], LABELS, NUMBERS)
    new = with_entries_by_position(program)
    assert len(scattered(new)) == len(scattered(program))


def test_a_scatter_of_what_varies_over_devices_stays():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = PartitionSpec("data")
    run = jax.shard_map(take(1, (2, 7)), mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    (eqn,) = program_of(run, LABELS, NUMBERS).eqns
    program = inlined_program(jax.extend.core.ClosedJaxpr(eqn.params["jaxpr"], ()))
    assert scattered(program)
    assert with_entries_by_position(program) is program
