"""Run a transform on several replicas, under shard_map and pmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jrc.dgc import dgc_specs
from tests import draws

AXIS = "data"
VIAS = ("shard_map", "unchecked", "pmap")


def mesh(replicas=4):
    devices = jax.devices()[:replicas]
    return jax.make_mesh((replicas,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def normal(key, params, steps, replicas):
    """Gradients like `params`, with leading axes for steps and replicas."""
    draw = np.random.default_rng(key)  # in NumPy: JAX compiles a program for each shape it draws
    like = lambda x: draw.normal(size=(steps, replicas, *x.shape)).astype(x.dtype)  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(like(x)), params)


def descend(tx, params, gradients):
    """Return parameters after every step, and the last state, of one replica."""

    def body(carry, gradient):
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    (_, state), path = jax.lax.scan(body, (params, tx.init(params)), gradients)
    return path, state


def trajectory(tx, params, gradients, via="shard_map", replicas=4):
    """`descend` on replicas; returns `path[step, replica, ...]` and the state's u and v flat."""
    own = functools.partial(descend, tx)
    if via == "pmap":
        run = jax.pmap(own, axis_name=AXIS, in_axes=(None, 1), devices=jax.devices()[:replicas])
        path, state = run(params, gradients)
        return jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 0, 1), path), merged(state)
    specs = dgc_specs(jax.eval_shape(tx.init, params), AXIS)

    def one(params, gradients):
        path, state = own(params, jax.tree.map(lambda x: x[:, 0], gradients))
        return jax.tree.map(lambda x: x[:, None], path), state

    run = jax.shard_map(
        one,
        mesh=mesh(replicas),
        in_specs=(P(), P(None, AXIS)),
        out_specs=(P(None, AXIS), specs),
        check_vma=via == "shard_map",
    )
    path, state = jax.jit(run)(params, gradients)
    return jax.tree.map(np.asarray, path), jax.tree.map(np.asarray, state)


def merged(stacked):
    """The state that pmap stacks per replica, in the layout that `dgc_specs` describes."""
    specs = dgc_specs(stacked, AXIS)
    return jax.tree.map(
        lambda x, spec: np.asarray(x)[:, 0] if spec == P(AXIS) else np.asarray(x)[0],
        stacked,
        specs,
    )


def stepper(tx, params, replicas=4, check_vma=True):
    """A state, and a jitted `step(gradients[replica, ...], state, params)`, under shard_map."""
    specs = dgc_specs(jax.eval_shape(tx.init, params), AXIS)
    over = functools.partial(jax.shard_map, mesh=mesh(replicas), check_vma=check_vma)
    state = jax.jit(over(tx.init, in_specs=P(), out_specs=specs))(params)

    def one(gradients, state, params):
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state, params)

    step = jax.jit(over(one, in_specs=(P(AXIS), specs, P()), out_specs=(P(), specs)))
    return state, step


def assert_trees_close(actual, expected, tolerance):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


def assert_bit_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def some_params(key=0):
    return {
        "kernel": draws.normal((key, 0), 40, 50),
        "bias": jnp.asarray(np.linspace(0, 1, 7, dtype=np.float32)),
        "scale": draws.normal((key, 1), 1200),
        "shift": jnp.float32(0.5),
    }
