"""Measures of recomputation: equal gradients, saved bytes, recomputed operators."""

from collections import Counter

import jax
import jax.numpy as jnp

from jrc._jaxpr import call_name, primitive_name, walk

# What transposition adds, in numbers that depend on how cotangents meet, and the names and no-ops
# that `jax.checkpoint` puts on a value that it keeps.
BOOKKEEPING = {"add_any", "add_jaxvals", "optimization_barrier", "broadcast_in_dim", "pvary"}
BOOKKEEPING |= {"name", "CheckpointName", "reduce_precision"}
# The identity that gives a saved value its derivative.
SAVED = "held_result"


def saved_bytes(fn, *args):
    """Bytes that the derivative keeps besides the arguments, each buffer once."""
    _, pull = jax.vjp(fn, *args)
    given = {id(x) for x in jax.tree.leaves(args)}
    kept = {id(x): x for x in jax.tree.leaves(pull) if id(x) not in given}
    return sum(x.nbytes for x in kept.values())


def operators(fn, *args):
    """How often each primitive stands in the program, inner programs times their length."""
    counts = Counter()
    for eqn, times in walk(jax.make_jaxpr(fn)(*args)):
        if call_name(eqn) != SAVED:
            counts[primitive_name(eqn)] += times
    return counts


def compiled_products(fn, *args):
    """Matrix products in the compiled value and gradient; dead ones are gone."""
    return jax.jit(jax.value_and_grad(fn)).lower(*args).compile().as_text().count(" dot(")


def rerun_operators(lean, plain, *args, argnums=0):
    """Primitives that the gradient of `lean` runs more often than that of `plain`."""
    more = operators(jax.grad(lean, argnums), *args)
    more.subtract(operators(jax.grad(plain, argnums), *args))
    skip = BOOKKEEPING | {"remat2", "checkpoint", "RematTraced", "mark", "jit"}
    return Counter({name: n for name, n in more.items() if n and name not in skip})


def bit_equal(a, b):
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(bool(jnp.array_equal(x, y, equal_nan=True)) for x, y in pairs)


def largest_error(a, b):
    """Largest difference of two trees, each leaf relative to its largest entry."""
    errors = [
        float(jnp.max(jnp.abs(x - y)) / jnp.maximum(jnp.max(jnp.abs(y)), 1e-30))
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
        if x.size
    ]
    return max(errors, default=0.0)
