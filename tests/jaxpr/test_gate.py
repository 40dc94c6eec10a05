"""A gate is an identity that controls gradients, and does not count as an operator."""

import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc._jaxpr import changed, gate, trace
from tests.remat.measure import bit_equal

X = jnp.linspace(-1.0, 1.0, 6)
ZEROS = jnp.zeros(6)

TRANSFORMS = {
    "call": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda *xs: jax.lax.scan(lambda c, _: (c, f(*xs)), 0.0, None, length=1)[1][0],
    "vmap": lambda f: lambda *xs: jax.vmap(f)(*xs),
    "vmap of x alone": lambda f: lambda x, p: jax.vmap(f, (0, None))(x, p[0]) + 0 * p,
    "vmap of the probe": lambda f: lambda x, p: jax.vmap(f, (None, 0))(x[0], p) + 0 * x,
}


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_probe_gets_the_gradient_of_the_value(name):
    def f(x, probe):
        return jnp.sin(gate(x * 2, probe)) * 3

    def plain(x, probe):
        return jnp.sin(x * 2 + probe) * 3

    run = [TRANSFORMS[name](g) for g in (f, plain)]
    value, want = (g(X, ZEROS) for g in run)
    assert jnp.allclose(value, want, rtol=1e-6)
    grads, wants = (jax.grad(lambda *xs, g=g: jnp.sum(g(*xs)), (0, 1))(X, ZEROS) for g in run)
    for got, want in zip(grads, wants, strict=True):
        assert jnp.allclose(got, want, rtol=1e-6)


def test_a_gate_can_stop_a_gradient_and_return_it():
    def f(x, probe):
        return jnp.sum(jnp.sin(gate(x * 2, probe, stop=True)) + x)

    x, probe = jax.grad(f, (0, 1))(X, ZEROS)
    assert bit_equal((x, probe), (jnp.ones(6), jnp.cos(X * 2)))
    assert bit_equal(jax.grad(lambda x: jnp.sum(gate(x**2, stop=True)))(X), ZEROS)
    stopped = jax.vmap(lambda x: gate(x**2, stop=True))
    assert bit_equal(jax.grad(lambda x: jnp.sum(stopped(x)))(X), ZEROS)


def test_a_gate_returns_the_value_bit_for_bit():
    value = jnp.array([-0.0, jnp.nan, jnp.inf])
    got = jax.jit(gate)(value, jnp.ones(3))
    assert bit_equal(got, value) and bool(jnp.signbit(got[0]))


def test_a_program_is_cut_as_if_there_were_no_gate():
    def loss(x, probe=None):
        h = jnp.sin(x * 2)
        h = h if probe is None else gate(h, probe)
        return jnp.sum(jnp.cos(jrc.mark(jnp.exp(jnp.sin(jrc.mark(h, "h"))), "e")))

    for rule in ("partition", "fluid", "pass"):
        one, two = (
            jrc.find_segments(loss, ["h", "e"], *xs, rule=rule) for xs in ((X,), (X, ZEROS))
        )
        parts = [
            [(s.boundary, len(s.equations), len(s.rerun)) for s in c.segments] for c in (one, two)
        ]
        assert parts[0] == parts[1] and one.held == two.held == ("h", "e")
    program = trace(loss, (X, ZEROS), {}).program
    assert list(program.marks) == ["h", "e"] and program.matching_marks("h") == ("h",)


def test_every_reader_of_a_value_reads_the_changed_one():
    def f(x):
        y = jnp.sin(x)
        jnp.exp(y)
        return y, y * 2, x

    program = trace(f, (X,), {}).program
    sine = program.eqns[0].outvars[0]
    double = lambda x: x * 2  # noqa: E731
    got = changed(program, {sine: double})(X)
    assert bit_equal(got, [jnp.sin(X) * 2, jnp.sin(X) * 2 * 2, X])
    got = changed(program, {program.jaxpr.invars[0]: double})(X)
    assert bit_equal(got, [jnp.sin(X * 2), jnp.sin(X * 2) * 2, X * 2])
    assert bit_equal(changed(program, {})(X), list(f(X)))
