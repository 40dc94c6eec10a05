"""Two axes: a dense mean inside a host, the sparse exchange between hosts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jrc.dgc import dgc_momentum, dgc_specs, dgc_stats
from tests.dgc.replicas import AXIS, assert_bit_equal, assert_trees_close, normal, trajectory

HOSTS, DEVICES = 2, 4
PARAMS = {"w": jnp.ones((40, 30)), "b": jnp.ones(5)}
ARGS = {"sparsity": (0.5, 0.99), "rampup_begin_step": 1, "rampup_step": 4, "min_size": 100}


def mesh():
    return jax.make_mesh((HOSTS, DEVICES), ("host", "chip"), axis_types=(AxisType.Auto,) * 2)


def run(tx, gradients, check_vma=True):
    """Parameters after each step on every device, and the last state."""
    specs = dgc_specs(jax.eval_shape(tx.init, PARAMS), ("chip", "host"))

    def one(params, gradients):
        def body(carry, gradient):
            updates, state = tx.update(gradient, carry[1], carry[0])
            params = jax.tree.map(lambda p, u: p + u, carry[0], updates)
            return (params, state), params

        first = params, tx.init(params)
        (_, state), path = jax.lax.scan(body, first, jax.tree.map(lambda x: x[:, 0], gradients))
        return jax.tree.map(lambda x: x[:, None], path), state

    over = functools.partial(jax.shard_map, mesh=mesh(), check_vma=check_vma)
    both = P(None, ("host", "chip"))
    return jax.jit(over(one, in_specs=(P(), both), out_specs=(both, specs)))(PARAMS, gradients)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_host_is_one_replica_with_the_mean_gradient(check_vma):
    gradients = normal(0, PARAMS, 6, HOSTS * DEVICES)
    tx = dgc_momentum(0.1, 0.9, axis_name=("chip", "host"), local_grad_clip_norm=20.0, **ARGS)
    path, state = run(tx, gradients, check_vma)
    path = jax.tree.map(np.asarray, path)
    for device in range(1, HOSTS * DEVICES):
        assert_bit_equal(
            jax.tree.map(lambda x, d=device: x[:, d], path), jax.tree.map(lambda x: x[:, 0], path)
        )

    means = jax.tree.map(lambda g: g.reshape(6, HOSTS, DEVICES, *g.shape[2:]).mean(2), gradients)
    flat = dgc_momentum(0.1, 0.9, axis_name=AXIS, local_grad_clip_norm=20.0, **ARGS)
    expected, last = trajectory(flat, PARAMS, means, replicas=HOSTS)
    first = functools.partial(jax.tree.map, lambda x: x[:, 0])
    assert_trees_close(first(path), first(expected), 1e-5)
    assert_trees_close(state[0].v, last[0].v, 1e-5)
    assert state[0].v["w"].shape == (HOSTS, 40, 30)
    assert dgc_stats(state).bytes_sent == dgc_stats(last).bytes_sent


def test_a_gradient_that_is_not_finite_on_one_chip_skips_the_step_on_all_hosts():
    gradients = normal(1, PARAMS, 2, HOSTS * DEVICES)
    gradients["b"] = gradients["b"].at[1, 5, 2].set(jnp.nan)
    tx = dgc_momentum(0.1, 0.9, axis_name=("chip", "host"), **ARGS)
    path, state = run(tx, gradients)
    assert_bit_equal(jax.tree.map(lambda x: x[1], path), jax.tree.map(lambda x: x[0], path))
    assert int(state[0].skipped) == 1 and int(state[0].step) == 1


def test_gradients_that_were_summed_within_a_host():
    tx = dgc_momentum(0.1, 0.9, axis_name=("chip", "host"), **ARGS)

    def one(params, batch):
        local = jax.lax.pcast(params, "host", to="varying")
        gradient = jax.grad(lambda p: jnp.sum(p["w"] * batch) + jnp.sum(p["b"]))(local)
        return tx.update(gradient, tx.init(params), params)[0]

    over = jax.shard_map(one, mesh=mesh(), in_specs=(P(), P(("host", "chip"))), out_specs=P())
    with pytest.raises(ValueError, match="equal along axis"):
        jax.eval_shape(over, PARAMS, jnp.ones((8, 1)))
