"""Arrays drawn with NumPy: JAX compiles a program for each shape that it draws.

The modules of the tests are imported by every worker, and drew for seven seconds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, *shape, scale=1.0):
    """Normal numbers in float32."""
    drawn = scale * np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(drawn.astype(np.float32))


def integers(seed, end, *shape):
    """Whole numbers from 0 to below `end`."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, end, shape, np.int32))


def parameters(init, *args, **options):
    """Parameters of the shapes that `init` gives: small matrices, and vectors of about one."""
    shapes = jax.eval_shape(functools.partial(init, **options), *args)
    draw = np.random.default_rng(0)

    def leaf(x):
        drawn = draw.normal(size=x.shape)
        drawn = drawn / np.sqrt(x.size / x.shape[-1]) if x.ndim > 1 else 1 + abs(drawn) / 10
        return jnp.asarray(drawn.astype(x.dtype))

    return jax.tree.map(leaf, shapes)
