"""What the planner compiles is the user's own program, so that JAX's cache has it."""

import re

import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc.remat._gradient import compiled_memory
from tests.remat.planner.problems import problem_of

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
W = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def loss(params, x):
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def with_aux(x, params):
    return loss(params, x), {"mean": x.mean(), "none": None}


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize(
    "fn, args, argnums",
    [
        (loss, ({"layers": [W, W]}, X), 0),
        (loss, ({"layers": (W,)}, X), (0, 1)),
        (loss, ({"layers": [W]}, X), [-1]),
        (with_aux, (X, {"layers": [W]}), 1),
    ],
)
def test_it_is_the_program_of_value_and_grad(fn, args, argnums):
    has_aux = fn is with_aux
    plan = jrc.plan(fn, *args, budget=0.0, argnums=argnums, has_aux=has_aux)
    problem = problem_of(fn, args, argnums, has_aux)
    chosen = tuple(argnums) if isinstance(argnums, list) else argnums
    own = jax.jit(jax.value_and_grad(plan.apply(fn), chosen, has_aux)).lower(*args)
    lowered = {problem.gradient.lower(each.whole).lowered.as_text() for each in problem.options}
    assert own.as_text() in lowered
    plain = jax.jit(jax.value_and_grad(fn, chosen, has_aux)).lower(*args)
    assert plain.as_text() in lowered


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("more", [{"step": 3}, {"name": "train"}, {"mask": jnp.arange(4) > 1}])
def test_other_leaves_and_results_are_compiled_too(more):
    """`jax.value_and_grad` takes no integers, and `jax.jit` no text."""
    fn = lambda params, x: (loss(params, x), "a text")  # noqa: E731
    params = {"layers": [W, W]} | more
    plan = jrc.plan(fn, params, X, budget=0.0, has_aux=True)
    assert plan.verified.peak_bytes > 0


@pytest.mark.parametrize(
    "more", [{"rate": 0.5}, {"rate": 0.5, "run": jnp.sin}, {"rate": 0.5, "train": True}]
)
def test_numbers_of_a_module_are_constants(more):
    """As under `equinox.filter_grad`; what `jax.grad` takes as it is differentiates them."""

    def fn(module, x):
        for w in module["layers"]:
            x = jnp.tanh(x @ w) * module["rate"]
        return jnp.sum(module.get("run", jnp.sin)(x))

    def run(*arrays):
        x = arrays[-1]
        bound = lambda layers: (fn({"layers": layers} | more, x), [])  # noqa: E731
        return jax.value_and_grad(bound, has_aux=True)(list(arrays[:-1]))

    args = {"layers": [W, W]} | more, X
    problem = problem_of(fn, args, 0, False)
    lowered = [problem.gradient.lower(each.whole).lowered for each in problem.options]
    texts = {each.as_text() for each in lowered}
    if len(more) == 1:
        own = jax.jit(jax.value_and_grad(fn)).lower(*args)
        results = [jax.tree.leaves(each.out_info) for each in lowered]
        assert {len(each) for each in results} == {4}
    else:
        own = jax.jit(run).lower(W, W, X)
    assert own.as_text() in texts
    assert jrc.explain(fn, *args).memory.arguments == (260 if len(more) == 1 else 256)


def test_an_error_of_the_compiler_tells_what_it_was_compiling(monkeypatch):
    def fails(lowered, platform=None):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    monkeypatch.setattr(compiled_memory, "compiled_to_look_at", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RET_CHECK") as caught:
        jrc.plan(loss, {"layers": [W, W]}, X, budget=10**9)
    (note,) = caught.value.__notes__
    assert re.search(r"for `loss`, candidate '[^']+'\. Another budget", note)
