"""Facts of single equations: programs inside, parameters, axes, regions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jrc._jaxpr import (
    dimension_numbers,
    exponent_of,
    facts_of,
    gate,
    has_barrier,
    has_batch_axes,
    inner_program,
    inner_programs,
    is_differentiated_region,
    is_unrolled,
    mesh_of_shard_map,
    operand_axes,
    parameters_of,
    policy_answer,
    primitive_name,
    reduced_axes,
    stops_gradient,
    takes_one_of_each_row,
    walk,
)

X = jnp.linspace(0.1, 0.9, 12).reshape(3, 4)


def equation(name, fn, *args):
    """The first equation of a primitive, at any depth."""
    return next(e for e, _ in walk(jax.make_jaxpr(fn)(*args)) if primitive_name(e) == name)


def test_the_program_inside():
    def loop(x, unroll=1):
        return lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=6, unroll=unroll)[0]

    eqn = equation("scan", loop, X)
    assert [each.primitive.name for each in inner_program(eqn).eqns] == ["sin"]
    assert not is_unrolled(eqn) and not is_unrolled(inner_program(eqn).eqns[0])
    assert is_unrolled(equation("scan", lambda x: loop(x, 2), X))
    eqn = equation("cond", lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X)
    assert [each.eqns[0].primitive.name for each in inner_programs(eqn)] == ["cos", "sin"]
    for without_a_single_one in (eqn, equation("sin", jnp.sin, X)):
        with pytest.raises(ValueError, match="unpack"):
            inner_program(without_a_single_one)


def test_axes_of_products():
    product = equation("dot_general", lambda x, w: jnp.einsum("blif,bwf->bliw", x, w),
                       jnp.ones((2, 4, 6, 8)), jnp.ones((2, 3, 8)))  # fmt: skip
    assert {operand_axes(product, 0)[:2], operand_axes(product, 1)[:2]} == {
        ((0,), (1, 2)),
        ((0,), (1,)),
    }
    assert has_batch_axes(product) and not has_batch_axes(equation("dot_general", jnp.dot, X, X.T))
    groups = jnp.array([1, 2])
    ragged = equation("ragged_dot_general", lax.ragged_dot, X, jnp.ones((2, 4, 5)), groups)
    assert not has_batch_axes(ragged)
    kernel = jnp.ones((3, 2, 2))
    convolution = equation(
        "conv_general_dilated", lambda x, w: lax.conv(x, w, (1,), "SAME"), X[:, :2, None], kernel
    )
    assert dimension_numbers(convolution).lhs_spec == (0, 1, 2)
    assert not has_batch_axes(convolution)


def test_axes_that_are_reduced():
    assert reduced_axes(equation("reduce_max", lambda x: x.max(1), X)) == (1,)
    assert reduced_axes(equation("sin", jnp.sin, X)) == ()


def test_parameters():
    power = equation("integer_pow", lambda x: x**3, X)
    assert exponent_of(power) == 3 and dict(parameters_of(power)) == {"y": 3}
    assert exponent_of(equation("pow", lambda x: x**0.3, X)) is None
    names = [name for name, _ in parameters_of(equation("dot_general", jnp.dot, X, X.T))]
    assert names == sorted(names) and "dimension_numbers" in names


def test_the_mesh_of_a_shard_map():
    mesh = AbstractMesh((3,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    sharded = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    assert dict(mesh_of_shard_map(equation("shard_map", sharded, X)).shape) == {"x": 3}
    assert mesh_of_shard_map(equation("sin", sharded, X)) is None


def test_where_no_gradient_flows():
    assert stops_gradient(equation("gate", lambda x: gate(x, stop=True), X))
    assert not stops_gradient(equation("gate", gate, X))
    assert not stops_gradient(equation("sin", jnp.sin, X))


@pytest.mark.parametrize("barrier", [True, False])
def test_regions_of_a_backward_pass(barrier):
    region = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=barrier)
    loss = lambda x: region(x).sum()  # noqa: E731
    (written,) = (e for e, _ in walk(jax.make_jaxpr(loss)(X)) if facts_of(e).is_region)
    assert not is_differentiated_region(written) and not has_barrier(written)
    backward = [e for e, _ in walk(jax.make_jaxpr(jax.grad(loss))(X)) if facts_of(e).is_region]
    differentiated = [e for e in backward if is_differentiated_region(e)]
    assert len(differentiated) == (not jax.config.jax_remat3)
    assert all(has_barrier(e) == barrier for e in differentiated)


def test_a_policy_is_asked_in_jaxs_way():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    batched = lambda x, w: jnp.einsum("bf,bfw->bw", x, w)  # noqa: E731
    assert policy_answer(policy, equation("dot_general", jnp.dot, X, X.T))
    assert not policy_answer(policy, equation("dot_general", batched, X, np.ones((3, 4, 2))))
    assert not policy_answer(policy, equation("sin", jnp.sin, X))


@pytest.mark.parametrize(
    ("take", "is_one_of_each"),
    [
        (lambda x, i: jnp.take_along_axis(x, i[:, None], axis=1), True),
        (lambda x, i: jax.vmap(lambda row, k: row[k])(x, i), True),
        (lambda x, i: jnp.take_along_axis(x, jnp.stack([i, i], 1), axis=1), False),
        (lambda x, i: x[jnp.arange(3), i], False),
        (lambda x, i: x[i], False),
    ],
    ids=["along an axis", "vmap", "two of each row", "by pairs of indices", "whole rows"],
)
def test_one_entry_of_each_row(take, is_one_of_each):
    assert takes_one_of_each_row(equation("gather", take, X, jnp.arange(3))) is is_one_of_each
