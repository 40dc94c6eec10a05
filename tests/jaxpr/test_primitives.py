"""The table of primitives: what it states is what JAX does."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jrc._jaxpr import Fusion, Reads, View, evaluate, facts_of, primitives_where
from jrc.remat._region.derivative_reads import derivative_reads

X = jnp.linspace(0.1, 0.9, 12).reshape(3, 4)
MASK, AT = X > 0.5, jnp.array([[0], [2]])


def words(text):
    return frozenset(text.split())


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmax, lax.pmin])
def test_a_reduction_over_a_mapped_axis_is_no_collective(reduce):
    """Under `jax.vmap` it stands with a positional axis; no device exchanges anything."""
    mapped = jax.vmap(lambda x: reduce(x, "batch"), axis_name="batch")
    collectives = primitives_where(lambda facts: facts.is_collective)
    eqns = jax.make_jaxpr(mapped)(jnp.ones((3, 2))).eqns
    (eqn,) = [each for each in eqns if each.primitive.name in collectives]
    assert not facts_of(eqn).is_collective


def ragged(x, w):
    return lax.ragged_dot(x, w, jnp.array([1, 2]))


# One equation for every row that states what its derivative reads, except those that need a mesh.
SAMPLES = {
    "tanh": (jnp.tanh, X), "logistic": (lax.logistic, X), "exp": (jnp.exp, X),
    "exp2": (jnp.exp2, X), "sqrt": (jnp.sqrt, X), "cbrt": (jnp.cbrt, X),
    "reshape": (lambda x: lax.reshape(x, (12,)), X),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), X[None]),
    "copy": (lambda x: lax.copy_p.bind(x), X),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (1, 2)), X),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), X),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), X),
    "rev": (lambda x: lax.rev(x, (0,)), X), "slice": (lambda x: lax.slice(x, (0, 0), (2, 2)), X),
    "pad": (lambda x: lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0))), X),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), X, X),
    "split": (lambda x: lax.split(x, (1, 2)), X),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, i), (2, 2)), X, 1),
    "dynamic_update_slice": (lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)), X, X[:1], 1),
    "complex": (lax.complex, X, X), "real": (jnp.real, X + 1j * X), "imag": (jnp.imag, X + 1j * X),
    "add": (lax.add, X, X), "sub": (lax.sub, X, X), "neg": (lax.neg, X),
    "reduce_sum": (lambda x: jnp.sum(x), X), "cumsum": (lambda x: lax.cumsum(x), X),
    "gather": (lambda x, i: lax.gather(
        x, i, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 4)), X, AT),
    "mul": (lax.mul, X, X), "select_n": (lax.select, MASK, X, X),
    "dot_general": (lambda x, y: lax.dot(x, y), X, X.T),
    "ragged_dot_general": (ragged, X, jnp.ones((2, 4, 5))),
    "conv_general_dilated": (
        lambda x, w: lax.conv(x, w, (1,), "SAME"), jnp.ones((1, 2, 5)), jnp.ones((3, 2, 2))),
    "optimization_barrier": (lambda x: lax.optimization_barrier(x), X),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_jax_reads_no_more_than_the_table_says(name):
    function, *args = SAMPLES[name]
    args = [jnp.asarray(x) for x in args]
    jaxpr = jax.make_jaxpr(function)(*args)
    (eqn,) = [each for each in jaxpr.eqns if each.primitive.name == name]
    run = evaluate(jaxpr)
    floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]
    operands, results = derivative_reads(run, args, floats)
    # A scalar index does not count: it costs nothing to save.
    operands = {i for i in operands if args[i].ndim}
    stated = facts_of(eqn).derivative_reads
    assert bool(operands) <= bool(stated & Reads.OPERANDS)
    assert bool(results) <= bool(stated & Reads.RESULT)
    if stated is not Reads.NOTHING:
        assert operands or results, "the table states more than JAX reads"


@pytest.mark.parametrize("name", sorted(primitives_where(lambda row: row.is_view) & set(SAMPLES)))
def test_a_view_has_the_entries_of_its_operand(name):
    function, x = SAMPLES[name]
    assert jnp.array_equal(function(x).ravel(), x.ravel())


def test_every_row_that_states_reads_has_a_sample():
    stated = primitives_where(lambda facts: facts.derivative_reads is not Reads.BOTH)
    needs_a_mesh = primitives_where(lambda facts: facts.is_collective or facts.is_cast)
    names = primitives_where(lambda facts: facts.view is View.NAME)
    # `add_any` occurs only in transposed programs; the others are synonyms or have no tangent.
    other = words(
        "add_any broadcast_to stack unstack tile stop_gradient sharding_constraint reshard"
    )
    assert stated - needs_a_mesh - names - other == set(SAMPLES)


def test_an_unknown_primitive_is_assumed_to_be_expensive():
    (eqn,) = jax.make_jaxpr(lambda x: lax.igamma(x, x))(X).eqns
    facts = facts_of(eqn)
    assert facts.derivative_reads is Reads.BOTH and facts.fusion is Fusion.NONE
    assert facts.flops(eqn) == 12
