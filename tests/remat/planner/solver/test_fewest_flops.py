"""Where costs are seconds, a few save sets of the fewest FLOPs are options too."""

import jax
import jax.numpy as jnp

from tests.draws import normal
from tests.remat.planner.problems import problem_of


def dense(weights, x):
    """Layers that read all before them: what is joined is cheap to make again."""
    for w in weights:
        x = jnp.concatenate([x, jax.nn.gelu(x / (1 + jnp.abs(x))) @ w], 1)
    return jnp.mean(x**2)


def test_options_are_those_of_a_front_by_flops_with_their_seconds():
    args = [normal(i, 64 + 32 * i, 32) for i in range(8)], jnp.ones((512, 64))
    by_time = problem_of(dense, args, minimize="time")
    by_flops = problem_of(dense, args, minimize="flops")
    found = [each for each in by_time.front if each.family == "fewest FLOPs"]
    assert found and not [each for each in by_flops.front if each.family == "fewest FLOPs"]
    flops = by_time.flops_of
    for each in found:  # the front is thinned
        others = [o for o in by_flops.front if o.peak <= each.peak]
        least = min(map(by_flops.flops_of, others))
        assert flops(each) <= least + 0.01 * by_time.flops
    peaks = [each.peak for each in by_time.front]
    assert peaks == sorted(peaks)
    # Fewer FLOPs than any of the front by seconds that needs no more.
    others = [each for each in by_time.front if each.family == "solver"]
    fewer = [
        each
        for each in found
        if flops(each) < min((flops(o) for o in others if o.peak <= each.peak), default=0)
    ]
    assert fewer


def test_options_in_loops_and_beside_them():
    def loss(w, x):
        step = lambda x, w: (x + jax.nn.gelu(x @ w) @ w.T, None)  # noqa: E731
        return jnp.sum(jnp.tanh(jax.lax.scan(step, jnp.sin(x), w)[0]) ** 2)

    args = normal(0, 4, 64, 128, scale=0.1), jnp.ones((256, 64))
    problem = problem_of(loss, args, minimize="time")
    for each in problem.front:
        program = problem.function.gradient(each.whole)
        assert program.eqns
    assert {each.family for each in problem.front} <= {"solver", "fewest FLOPs"}
