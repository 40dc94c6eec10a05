"""Dataflow and slices: a program computes the same however it is cut."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jrc
from jrc._jaxpr import INPUT, evaluate, flops, inline_all, primitive_name, trace, walk
from tests.remat.graphs import graphs

W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
X = jnp.linspace(-0.4, 0.6, 16).reshape(4, 4)


@given(graphs(), st.data())
@settings(max_examples=30, deadline=None)
def test_slices_compose(graph, data):
    program = trace(graph, (W, X), {}).program
    live = [p for p, is_live in enumerate(program.live()) if is_live]
    ends = sorted(data.draw(st.sets(st.sampled_from(live))) | {live[-1]})
    values, start = dict(zip(program.jaxpr.invars, (W, X), strict=True)), 0
    for end in ends:
        part = program.cut([p for p in live if start <= p <= end])
        assert set(part.invars) <= set(values)
        results = evaluate(part)(*(values[var] for var in part.invars))
        values |= dict(zip(part.outvars, results, strict=True))
        start = end + 1
    assert np.array_equal(program.results(values)[0], graph(W, X), equal_nan=True)


def test_producers_consumers_and_names():
    def f(w, x):
        a = jrc.mark(x @ w, "a")
        return jnp.sin(a), a * 2

    program = trace(f, (W, X), {}).program
    dot, mark, sin, mul = range(4)
    a, marked = program.eqns[dot].outvars[0], program.eqns[mark].outvars[0]
    assert program.producer[program.jaxpr.invars[0]] == INPUT
    assert program.producer[marked] == mark and program.unmarked(marked) is a
    assert program.consumers[a] == (mark,) and program.consumers[marked] == (sin, mul)
    assert program.consumers[program.eqns[sin].outvars[0]] == (4,)
    assert program.name(dot) == "a" and program.name(sin).startswith("sin:(4,4)@test_program.py:")
    assert program.crossing([dot, mark]) == (marked,) and program.crossing([dot]) == (a,)


def test_closed_over_arrays_and_tracers_are_inputs():
    def outer(w):
        traced = trace(lambda x: x @ w + jnp.asarray(np.eye(4)), (X,), {})
        assert traced.inputs[-1] is X and any(x is w for x in traced.inputs)
        return jnp.sum(traced.run(evaluate(traced.program.jaxpr)))

    assert jax.grad(outer)(W).shape == W.shape


def test_a_branch_for_kernels_alone_is_no_branch():
    """`jnp.diag` has one for the inside of Pallas kernels; a branch for a platform stays one."""
    x = jnp.arange(9.0).reshape(3, 3)
    written = jax.make_jaxpr(jnp.diag)(x)
    inlined = inline_all(written)
    names = lambda jaxpr: {primitive_name(eqn) for eqn, _ in walk(jaxpr)}  # noqa: E731
    assert "cond" in names(written) and "cond" not in names(inlined)
    assert evaluate(inlined)(x)[0].tolist() == jnp.diag(x).tolist()
    assert flops(written) == flops(inlined)

    def on_platform(x):
        return jax.lax.platform_dependent(x, tpu=jnp.sin, default=jnp.cos)

    assert "cond" in names(inline_all(jax.make_jaxpr(on_platform)(1.0)))
