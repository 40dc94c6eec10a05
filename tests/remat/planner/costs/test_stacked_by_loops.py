"""What steps of loops write into stacks: counted once, in all options alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrc._targets.chips import CHIPS
from jrc.remat._gradient.residuals import residuals_of
from jrc.remat._planner.search.problem import Problem, Request

STEPS = 50
W = jax.ShapeDtypeStruct((128, 128), jnp.float32)


def loop(w, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=STEPS)[0]


def counted(w, x):
    """The same loop with its number among the carries."""
    return jax.lax.fori_loop(0, STEPS, lambda _, c: jnp.tanh(c @ w), x)


def nested(w, x):
    inner = lambda c, _: (jnp.tanh(c @ w), None)  # noqa: E731
    outer = lambda c, _: (jax.lax.scan(inner, c, None, length=STEPS // 10)[0], None)  # noqa: E731
    return jax.lax.scan(outer, x, None, length=10)[0]


def branched(w, x):
    return jax.lax.cond(x[0, 0] > 0, loop, lambda w, x: x, w, x)


@jax.custom_vjp
def custom(w, x):
    return loop(w, x)


custom.defvjp(lambda w, x: jax.vjp(loop, w, x), lambda vjp, ct: vjp(ct))


def problem_of(fn, target="h100"):
    def loss(w, x):
        return jnp.sum(jnp.tanh(fn(w, x) @ w) @ w)

    platform = CHIPS[target].platform
    return Problem.of(Request(loss, (W, W), target=target, platform=platform, minimize="time"))


def cost_of_region(problem):
    """The least cost of a manual plan that runs the whole loop again."""
    words = "every step", "products", "as written"
    found = (each for each in problem.manual if not any(word in each.name for word in words))
    return min(each.cost for each in found)


def cost_of(problem, name):
    (option,) = (each for each in problem.manual if each.name == name)
    return option.cost


@pytest.mark.parametrize("fn", [loop, jax.jit(loop), counted, nested, branched, custom])
def test_each_step_writes_the_carry_and_the_result_of_tanh(fn):
    found = residuals_of(lambda *xs: [fn(*xs)], [W, W], [0, 1]).stacked
    floating = [(aval, count) for aval, count in found if aval.shape]
    assert {aval.shape for aval, _ in floating} == {(128, 128)}
    assert sum(count for _, count in floating) == 2 * STEPS


def test_one_step_makes_no_stack():
    once = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=1)[0]  # noqa: E731
    assert residuals_of(lambda x: [once(x)], [W], [0]).stacked == []


@pytest.mark.parametrize("target", ["h100", "v5e"])
@pytest.mark.parametrize("fn", [jax.jit(loop), jax.checkpoint(loop), custom])
def test_a_region_around_a_loop_costs_the_same_in_all_forms(fn, target):
    expected, problem = problem_of(loop, target), problem_of(fn, target)
    assert problem.baseline.cost == expected.baseline.cost > 0
    region = cost_of_region(expected)
    assert cost_of_region(problem) == pytest.approx(region, rel=1e-3)
    assert region > expected.baseline.cost
    as_written = [each.cost for each in problem.manual if "as written" in each.name]
    assert as_written == pytest.approx([region] * len(as_written), rel=0.02)


def test_a_counter_that_nothing_reads_late_costs_nothing():
    name = "every step recomputed"
    assert cost_of(problem_of(counted), name) == cost_of(problem_of(loop), name)


def test_no_option_of_loops_in_loops_costs_less_for_what_is_left_out():
    problem = problem_of(nested)
    assert problem.baseline.cost == problem_of(loop).baseline.cost
    assert min(each.cost for each in problem.options) >= 0.9 * problem.baseline.cost


def test_a_mask_of_a_few_entries_puts_no_layers_into_one_region():
    """Six layers that read one mask: each may be recomputed by itself."""

    def loss(ws, x):
        mask = jnp.arange(128) % 3 == 0
        for w in ws:
            x = jnp.where(mask, x, jnp.tanh(jnp.sin(jnp.tanh(x @ w) @ w) @ w))
        return jnp.mean(x**2)

    shapes = (
        jax.ShapeDtypeStruct((6, 128, 128), jnp.float32),
        jax.ShapeDtypeStruct((4096, 128), jnp.float32),
    )
    request = Request(loss, shapes, target="h100", platform="cuda", minimize="time")
    problem = Problem.of(request)
    assert problem.front[0].peak < 0.6 * problem.baseline.peak
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=each.shape) / 8, each.dtype) for each in shapes]
    expected = jax.grad(loss)(*args)
    for option in (problem.front[0], problem.front[len(problem.front) // 2]):
        found = jax.grad(problem.function.applied(option.decision))(*args)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)
