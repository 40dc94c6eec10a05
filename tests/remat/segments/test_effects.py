"""Equations with effects run once, outside of recomputed regions, in every transform."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jrc
from tests.remat.measure import largest_error, rerun_operators

W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
X = jnp.linspace(-0.4, 0.6, 16).reshape(4, 4)


def recorded(w, x):
    """A scan that writes each step's mean into a reference."""
    x = jnp.sin(x @ w)
    means = jax.new_ref(jnp.zeros(3))

    def step(c, i):
        means[i] = jnp.mean(c)
        return jnp.tanh(c @ w), None

    c, _ = jax.lax.scan(step, x, jnp.arange(3))
    return jnp.sum(jnp.sin(jnp.sin(c @ w) @ w)) + jnp.sum(jax.freeze(means))


def marked(w, x):
    return jrc.mark(recorded(w, x), "out") * 1


# What is recomputed: products, sines. The scan runs once.
TRANSFORMS = {
    "recompute": (functools.partial(jrc.recompute, recorded), 3),
    "checkpoint": (functools.partial(jrc.recompute, recorded, use_reentrant=False), 3),
    "segments": (jrc.recompute_segments(marked, ["out"]), 3),
    "saved products": (jrc.apply_rules(recorded, jrc.SavePrimitives("dot_general")), 0),
    "recomputed sines": (jrc.apply_rules(recorded, jrc.RecomputePrimitives("sin")), 0),
    "recompute_op": (jrc.recompute_op(recorded), 0),
    "keep_op": (functools.partial(jrc.recompute, jrc.keep_op(recorded)), 0),
}


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=4)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_reference_that_a_scan_writes(name):
    lean, products = TRANSFORMS[name]
    assert largest_error(jax.jit(jax.grad(lean))(W, X), jax.grad(recorded)(W, X)) < 1e-6
    more = rerun_operators(lean, recorded, W, X)
    assert more["dot_general"] == products and more["tanh"] == 0 == more["scan"]


def test_a_plan_treats_it_alike():
    plan = jrc.plan(recorded, W, X, budget=0.5, verify=False)
    assert largest_error(jax.grad(plan.apply(recorded))(W, X), jax.grad(recorded)(W, X)) < 1e-6


def test_the_report_leaves_them_out():
    cut = jrc.find_segments(marked, ["out"], W, X)
    names = [name.partition(":")[0] for name in cut.segments[0].recomputed]
    assert "dot_general" in names and not {"scan", "new_ref", "freeze"} & set(names)


def test_other_keys_and_effects_are_refused():
    fn = lambda w, x, key: recorded(w, x)  # noqa: E731
    with pytest.raises(ValueError, match="preserve_rng_state must be True .* which runs 'new_ref'"):
        jrc.recompute(fn, W, X, jax.random.key(0), preserve_rng_state=False)


def counting(ref, w, x):
    """Reads how often it ran, and writes one more: what the next block reads."""
    n = ref[...]
    ref[...] = n + 1
    return jnp.sin(jnp.tanh(x @ w) * n)


@pytest.mark.parametrize(
    "block", [jrc.recompute, functools.partial(jrc.recompute, use_reentrant=False)]
)
def test_what_is_read_of_a_reference_is_written_back(block):
    def loss(w, ref, block):
        x = block(functools.partial(counting, ref), w, X)
        return jnp.sum(block(functools.partial(counting, ref), w, x))

    plain, lean = (
        jax.jit(jax.grad(functools.partial(loss, block=each)))
        for each in (lambda fn, *args: fn(*args), block)
    )
    refs = [jax.new_ref(jnp.float32(1)) for _ in range(2)]
    assert largest_error(lean(W, refs[0]), plain(W, refs[1])) < 1e-6
    assert float(refs[0][...]) == float(refs[1][...]) == 3


def test_a_region_that_writes_to_an_argument_is_looked_at():
    """Under `jax.checkpoint` it writes twice; the `Ref` among its residuals is no value."""

    def loss(w, x, ref):
        for _ in range(3):
            x = jax.checkpoint(functools.partial(counting, ref))(w, x)
        return jnp.sum(x)

    ref = jax.new_ref(jnp.float32(1))
    assert jrc.explain(loss, W, X, ref).saved_bytes > 0
    assert jrc.plan(loss, W, X, ref, budget=0.5, verify=False).predicted.peak_bytes > 0


def test_a_scan_that_runs_its_steps_again_refuses_them():
    """Reads too: what is read then may be another value in the backward pass."""
    ref = jax.new_ref(jnp.float32(1))

    def step(x, _):
        return x * ref[...], None

    with pytest.raises(ValueError, match=r"no effect that must run once.* got 'get:"):
        jrc.recompute_scan(step, X, None, length=4)
    shown = lambda x, _: (jax.debug.callback(lambda: None), (x, None))[1]  # noqa: E731
    assert largest_error(jrc.recompute_scan(shown, X, None, length=4)[0], X) == 0


def test_writes_stay_in_order():
    def ordered(x):
        ref = jax.new_ref(jnp.zeros(()))
        first = jnp.sin(x)
        ref[...] = 1.0
        ref[...] = ref[...] * 3.0
        ref[...] = ref[...] + 2.0
        return jnp.sum(jnp.sin(first)) * jax.freeze(ref)

    for lean in (
        functools.partial(jrc.recompute, ordered),
        jrc.apply_rules(ordered, jrc.RecomputePrimitives("sin")),
    ):
        assert largest_error(jax.value_and_grad(lean)(X), jax.value_and_grad(ordered)(X)) < 1e-6
