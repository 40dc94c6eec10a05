"""Arguments, gradients and states that are refused, and the texts of the errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jrc
from jrc.dgc import dgc_momentum, dgc_specs, dgc_stats, scale_by_dgc
from tests.dgc.replicas import AXIS, mesh

PARAMS = {"w": jnp.ones((20, 10)), "b": jnp.ones(3)}

WRONG = [
    ({"sparsity": ()}, "sparsity must have at least one level, got none"),
    ({"sparsity": []}, "sparsity must have at least one level, got none"),
    ({"sparsity": 1.0}, "every sparsity must be a number in [0, 1), got 1.0"),
    ({"clip_scaling": "none"}, "clip_scaling must be one of 'sqrt', 'rsqrt', got 'none'"),
    ({"count_dtype": "float16"}, "count_dtype must be one of 'float64', 'float32', got 'float16'"),
    (
        {"sparsity": (0.5, 1.0)},
        "every sparsity must be a number in [0, 1), got 1.0 in (0.5, 1.0)",
    ),
    ({"sparsity": -0.1}, "every sparsity must be a number in [0, 1), got -0.1"),
    ({"sparsity": float("nan")}, "every sparsity must be a number in [0, 1), got nan"),
    ({"rampup_step": 0}, "rampup_step must be a whole number >= 1, got 0"),
    ({"rampup_begin_step": -1}, "rampup_begin_step must be a whole number >= 0, got -1"),
    ({"num_trainers": 0, "axis_name": AXIS}, "num_trainers must be a whole number >= 1, got 0"),
    (
        {"num_trainers": 2},
        "num_trainers must be 1 or left out where axis_name is None, which",
    ),
    ({"momentum": 1.0}, "momentum must be a finite number in [0, 1), got 1.0. Pass 0.9."),
    ({"momentum": float("nan")}, "momentum must be a finite number in [0, 1), got nan"),
    ({"momentum": -0.5}, "momentum must be a finite number in [0, 1), got -0.5"),
    (
        {"local_grad_clip_norm": 0.0},
        "local_grad_clip_norm must be a finite number > 0, got 0.0. Pass None",
    ),
    ({"min_size": -1}, "min_size must be a whole number >= 0, got -1"),
    (
        {"selector": "best"},
        "selector must be one of 'exact', 'two_stage', 'blocked', 'global', 'sampled', 'auto' or "
        "an object with the methods of jrc.dgc.Selector, got 'best'. Leave selector out",
    ),
    (
        {"selector": "exact", "exchange": "sharded"},
        "selector must be 'blocked' for exchange='sharded', which needs as many entries of each "
        "block on every replica, got 'exact'. Leave selector out, or pass exchange='allgather'.",
    ),
    (
        {"wire": "f16"},
        "wire must be one of 'f32', 'bf16', 'fp8', 'int8' or an object with the methods of "
        "jrc.dgc.Wire, got 'f16'",
    ),
    (
        {"exchange": "ring"},
        "exchange must be one of 'allgather', 'sharded', 'dense', 'auto' or an object with the "
        "methods of jrc.dgc.EntryExchange or jrc.dgc.TensorExchange, got 'ring'",
    ),
    (
        {"axis_name": ("host", "host")},
        "axis_name must be None, the name of one axis or a pair (inner, outer) of two, got ('host'",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_values_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=re.escape(f"jrc.scale_by_dgc: {message}")):
        scale_by_dgc(**arguments)
    rest = {"momentum": 0.9, "rampup_begin_step": 0} | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        dgc_momentum(0.1, **rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rampup_step": 1.5}, "rampup_step must be a whole number >= 1, got 1.5"),
        ({"min_size": jnp.float32(3)}, "name 'min_size' in static_args"),
        ({"regularization": "l2"}, "regularization must be a number (the L2 factor), an optax"),
    ],
)
def test_values_of_the_wrong_kind(arguments, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        scale_by_dgc(**arguments)


def test_regularization_with_state():
    tx = scale_by_dgc(regularization=optax.trace(0.9))
    message = "a transform without state, got one with the state TraceState. Chain it in front"
    with pytest.raises(TypeError, match=re.escape(message)):
        tx.init(PARAMS)


def test_regularization_without_parameters():
    tx = scale_by_dgc(regularization=1e-4)
    with pytest.raises(ValueError, match="params must be given where there is a regular"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_complex_parameters():
    with pytest.raises(TypeError, match=re.escape("must be real, got complex64 of shape (2,)")):
        scale_by_dgc().init(jnp.ones(2, jnp.complex64))


def test_axis_that_nothing_binds():
    tx = scale_by_dgc(axis_name=AXIS)
    message = (
        "axis_name must be an axis that is bound by shard_map or pmap where update runs, got "
        "axis_name='data'. Call update inside jax.shard_map over a mesh with axis 'data' or inside "
        "jax.pmap(..., axis_name='data'), or pass axis_name=None"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def over_replicas(tx, gradients_of, check_vma=True):
    specs = dgc_specs(jax.eval_shape(tx.init, PARAMS), AXIS)

    def one(x, params):
        return tx.update(gradients_of(x, params), tx.init(params), params)

    over = functools.partial(jax.shard_map, mesh=mesh(), check_vma=check_vma)
    run = jax.jit(over(one, in_specs=(P(AXIS), P()), out_specs=(P(), specs)))
    return run(jnp.arange(4.0), PARAMS)


def loss(params, x):
    return (params["w"].sum() + params["b"].sum()) * x.sum()


def test_gradients_that_were_reduced_before():
    tx = scale_by_dgc(axis_name=AXIS, min_size=100)
    message = (
        "gradients must be local to each replica, got ones that are equal along axis 'data': "
        "jax.grad with respect to replicated parameters sums them"
    )
    with pytest.raises(ValueError, match=message) as raised:
        over_replicas(tx, lambda x, params: jax.grad(loss)(params, x))
    assert "jax.lax.pcast(params, 'data', to=\"varying\") before jax.grad" in str(raised.value)


@pytest.mark.parametrize("check_vma", [True, False])
def test_pcast_keeps_gradients_local(check_vma):
    tx = scale_by_dgc(axis_name=AXIS, min_size=100, sparsity=0.0)

    def local(x, params):
        return jax.grad(loss)(jax.lax.pcast(params, AXIS, to="varying"), x)

    updates, _ = over_replicas(tx, local, check_vma)
    assert updates["w"].tolist() == jnp.full((20, 10), 1.5).tolist()


def test_num_trainers_that_disagrees():
    tx = scale_by_dgc(axis_name=AXIS, num_trainers=8)
    message = "num_trainers must be the size of axis 'data', which is 4, got 8. Leave num_trainers"
    with pytest.raises(ValueError, match=re.escape(message)):
        over_replicas(tx, lambda x, params: params)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"w": PARAMS["w"]}, "must have the structure of the parameters that init got"),
        (jnp.ones(3), "must have the structure of the parameters that init got"),
        (
            PARAMS | {"w": jnp.ones((20, 11))},
            "the gradient of ['w'] must fit its state of shape (1, 20, 10), got (1, 20, 11). Build",
        ),
        (
            PARAMS | {"b": jnp.ones((3, 1))},
            "the gradient of ['b'] must fit its state of shape (3,), got (3, 1)",
        ),
        (
            PARAMS | {"w": jnp.ones((20, 10), jnp.int32)},
            "the gradient of ['w'] must be a floating array like its parameter, got int32",
        ),
        (
            PARAMS | {"w": None},
            "the gradient of ['w'] must be a floating array like its parameter, got None",
        ),
    ],
)
def test_gradients_that_do_not_fit(gradients, message):
    tx = scale_by_dgc(min_size=100)
    with pytest.raises(ValueError, match=re.escape(message)):
        tx.update(gradients, tx.init(PARAMS))


def test_stats_need_exactly_one_state():
    state = scale_by_dgc().init(PARAMS)
    with pytest.raises(ValueError, match="exactly one DGCState in it, got 0 in EmptyState"):
        dgc_stats(optax.EmptyState())
    with pytest.raises(ValueError, match="exactly one DGCState in it, got 2 in tuple"):
        dgc_stats((state, state))


@pytest.mark.parametrize(
    "arguments",
    [{"sparsity": "0.9"}, {"sparsity": None}, {"momentum": "0.9"}, {"local_grad_clip_norm": "1"}],
)
def test_an_argument_that_is_no_number_is_named(arguments):
    (name,) = arguments
    with pytest.raises(TypeError, match=f"jrc.scale_by_dgc: {name} must be a (finite )?number"):
        jrc.scale_by_dgc(**arguments)


def test_numbers_of_numpy_are_numbers():
    jrc.scale_by_dgc(np.float32(0.9), sparsity=np.float32(0.5), regularization=np.float32(1e-4))
    with pytest.raises(ValueError, match="regularization must be a finite number >= 0"):
        jrc.scale_by_dgc(regularization=-1.0)


@pytest.mark.parametrize(
    ("sparsity", "asked"), [(0.001, True), ((0.75, 0.01), True), ((0.25, 0.9), False), (0.0, False)]
)
def test_a_density_in_the_place_of_a_sparsity_is_asked_about(sparsity, asked, caplog):
    scale_by_dgc(sparsity=sparsity)
    assert ("is the density, write sparsity=(0.99" in caplog.text) == asked
