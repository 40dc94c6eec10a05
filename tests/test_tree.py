"""Abstract values of leaves: shape, dtype, weak type and sharding as JAX traces them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrc._tree import all_finite, aval_of

MESH = Mesh(jax.devices()[:4], ("data",))
SPLIT = NamedSharding(MESH, P("data"))

LEAVES = {
    "float": 2.0,
    "int": 3,
    "bool": True,
    "complex": 1j,
    "numpy scalar": np.float64(2.0),
    "numpy array": np.ones((2, 3)),
    "array": jnp.ones(3, jnp.bfloat16),
    "weak array": jnp.full((2, 1), 2.0),
    "keys": jax.random.split(jax.random.key(0), 2),
    "sharded": jax.device_put(jnp.ones(8), SPLIT),
}


@pytest.mark.parametrize("name", LEAVES)
def test_the_aval_is_traced_as_the_leaf_itself(name):
    leaf = LEAVES[name]
    program = jax.make_jaxpr(lambda x: x)
    assert str(program(aval_of(leaf))) == str(program(leaf))
    aval, traced = aval_of(leaf), jax.typeof(leaf)
    assert (aval.shape, aval.dtype, aval.weak_type) == (
        traced.shape, traced.dtype, traced.weak_type,
    )  # fmt: skip


def test_only_a_committed_array_prescribes_its_sharding():
    assert aval_of(LEAVES["sharded"]).sharding == SPLIT
    assert aval_of(LEAVES["array"]).sharding is None
    avals = [aval_of(LEAVES["sharded"]), aval_of(jnp.ones(8))]
    compiled = jax.jit(lambda x, y: x + y).lower(*avals).compile()
    assert compiled.input_shardings[0][0].spec == P("data")


def test_a_shape_is_its_own_aval():
    shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=SPLIT, weak_type=True)
    assert aval_of(shape) is shape


@pytest.mark.parametrize("check_vma", [True, False])
def test_tracers_of_manual_axes(check_vma):
    found = []

    def local(x):
        found.append(aval_of(x))
        return x

    specs = dict(mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    jax.eval_shape(jax.shard_map(local, **specs), jnp.full(8, 2.0))
    (aval,) = found
    assert (aval.shape, aval.dtype, aval.weak_type) == ((2,), jnp.float32, True)
    assert aval.sharding is None


def test_tracers_of_explicit_axes():
    found = []
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("data")))
        jax.eval_shape(lambda x: found.append(aval_of(x)), x)
    assert found[0].sharding.spec == P("data", None)


@pytest.mark.parametrize("leaf", ["text", None, object()])
def test_what_is_no_array_has_no_aval(leaf):
    with pytest.raises(TypeError):
        aval_of(leaf)


@pytest.mark.parametrize("spec", [P("data"), P(None), P(("data", "model"))])
def test_a_nan_is_seen_on_every_device(spec):
    """XLA's maximum over devices loses NaN."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    found = jax.jit(all_finite)
    for place in range(8):
        x = jnp.ones(8).at[place].set(jnp.nan)
        assert not found({"x": jax.device_put(x, NamedSharding(mesh, spec))})
    assert found({"x": jax.device_put(jnp.ones(8), NamedSharding(mesh, spec))})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64"])
def test_numbers_that_are_finite_and_not(dtype):
    x = jnp.ones(3, dtype)
    assert all_finite([x, jnp.zeros(0), jnp.arange(3), jax.random.key(0), None, True])
    assert not all_finite([x, x.at[1].set(jnp.nan)])
    assert not all_finite([x.at[2].set(-jnp.inf)])
    assert all_finite({}) and all_finite([jnp.complex64(3e38 + 3e38j)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_nan_is_seen_in_a_large_array(dtype):
    """XLA's maximum on a CPU loses NaN from some thousand entries on; a sum may overflow."""
    found = jax.jit(all_finite)
    for shape in ((300, 70), (100_003,)):
        large = np.full(shape, jnp.finfo(dtype).max, jnp.dtype(dtype))
        assert found(large)
        for bad, place in itertools.product((np.nan, np.inf, -np.inf), (0, 77, -1)):
            spoilt = large.copy()
            spoilt.flat[place] = bad
            assert not found(spoilt)
