"""Two small training tasks, built alike in the tests and in the process that they kill."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jrc
from jrc.models import gpt, mlp

REPLICAS = 4


def mesh():
    return Mesh(jax.devices()[:REPLICAS], ("data",))


def drawn(init, config):
    """Parameters, in one program."""
    return jax.jit(functools.partial(init, config=config))(jax.random.key(0))


@functools.cache  # a state has copies of the parameters
def digits():
    from sklearn.datasets import load_digits  # seconds, in each worker and child process

    config = mlp.Config((64, 128, 10), "relu")
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32)

    def batch(i):
        at = np.random.default_rng(i).integers(0, len(x), 32)
        return x[at], y[at].astype(np.int32)

    return drawn(mlp.init, config), functools.partial(mlp.loss, config=config), batch


@functools.cache
def tiny_gpt(dropout=0.0):
    config = gpt.Config(layers=2, heads=2, width=32, length=16, dropout=dropout)
    loss = functools.partial(gpt.loss, config=config)

    def batch(i):
        return np.random.default_rng(i).integers(0, 256, (8, 17)).astype(np.int32)

    lean = jrc.recompute_segments(loss, config.boundaries)
    return drawn(gpt.init, config), lean, batch


TASKS = {
    "digits": digits,
    "gpt": tiny_gpt,
    "gpt with dropout": functools.partial(tiny_gpt, dropout=0.1),
}


def dgc(axis_name="data"):
    return jrc.dgc_momentum(
        0.1, 0.9, 2, 4, (0.75, 0.99), local_grad_clip_norm=1.0, min_size=1000, axis_name=axis_name
    )


def start(task, tx, on=None, **options):
    """State, step and batches of a task."""
    params, loss, batch = TASKS[task]()
    on = on or mesh()
    state = jrc.init_state(params, tx, jax.random.key(7), mesh=on)
    return state, jrc.make_train_step(loss, tx, mesh=on, **options), batch


def same_bits(a, b):
    def bits(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(bits(x) == bits(y) for x, y in leaves)
