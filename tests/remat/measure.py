"""Measure recomputation in three ways: gradients, saved bytes, recomputed operators."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from jrc._jaxpr import call_name, primitive_name, walk

# Equations that transposition adds, whose number depends on how cotangents are summed, and the
# names and no-ops that `jax.checkpoint` puts on a saved value.
BOOKKEEPING = {"add_any", "add_jaxvals", "optimization_barrier", "broadcast_in_dim", "pvary"}
BOOKKEEPING |= {"name", "CheckpointName", "reduce_precision"}
# The name of the identity that a saved value passes through.
SAVED = "held_result"


def saved_bytes(fn, *args):
    """Return the bytes that the derivative saves besides the arguments, each buffer once."""
    _, vjp = jax.vjp(fn, *args)
    arguments = {id(x) for x in jax.tree.leaves(args)}
    saved = {id(x): x for x in jax.tree.leaves(vjp) if id(x) not in arguments}
    return sum(x.nbytes for x in saved.values())


def operators(fn, *args):
    """Return how often each primitive occurs in the program, loops times their length."""
    counts = Counter()
    for eqn, times in walk(jax.make_jaxpr(fn)(*args)):
        if call_name(eqn) != SAVED:
            counts[primitive_name(eqn)] += times
    return counts


def compiled_products(fn, *args):
    """Return the number of matrix products in the compiled value and gradient."""
    return jax.jit(jax.value_and_grad(fn)).lower(*args).compile().as_text().count(" dot(")


def rerun_operators(recomputed, plain, *args, argnums=0):
    """Return the primitives that one gradient runs more often than the plain one."""
    more = operators(jax.grad(recomputed, argnums), *args)
    more.subtract(operators(jax.grad(plain, argnums), *args))
    skip = BOOKKEEPING | {"remat2", "checkpoint", "RematTraced", "mark", "jit"}
    return Counter({name: n for name, n in more.items() if n and name not in skip})


def bit_equal(a, b):
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(_values(a), _values(b), strict=True)
    return all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def largest_error(a, b):
    """Return the largest difference of two trees, each leaf relative to its largest entry."""
    errors = [
        np.max(np.abs(x - y)) / np.maximum(np.max(np.abs(y)), 1e-30)
        for x, y in zip(_values(a, wide=True), _values(b, wide=True), strict=True)
        if x.size
    ]
    return float(np.max(errors, initial=0.0))


def _values(tree, wide=False):
    """Leaves in NumPy, where nothing is compiled for their shapes; `wide`: in double precision."""
    for x in jax.tree.leaves(tree):
        is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
        x = np.asarray(jax.random.key_data(x) if is_key else x)
        yield x.astype(complex if np.iscomplexobj(x) else float) if wide else x
