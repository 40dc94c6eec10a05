"""Maxima over windows on a CPU: the places that their gradient needs, in regions and outside."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jrc
from jrc._jaxpr import Program, inline_all
from jrc.remat._planner.costs.build_cost_graph import build_cost_graph
from jrc.remat._planner.costs.compilers import CPU, GPU
from tests.draws import normal


def peak_bytes(fn, *args):
    compiled = jax.jit(jax.value_and_grad(fn)).lower(*args).compile()
    memory = compiled.memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    return sum(sizes) - memory.alias_size_in_bytes


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def convolved(x, kernel):
    names = "NHWC", "HWIO", "NHWC"
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names)
    y = y - jnp.mean(y, (0, 1, 2), keepdims=True)
    return jax.nn.relu(y * lax.rsqrt(jnp.mean(y**2, (0, 1, 2), keepdims=True) + 1e-5))


def block(x, kernels):
    for kernel in kernels:
        x = convolved(x, kernel)
    return x


def network(params, x, block=block):
    for kernels in params:
        x = pooled(block(x, kernels))
    return jnp.mean(x**2)


PARAMS = [[normal(2 * i + j, 3, 3, 16 if i + j else 3, 16) for j in (0, 1)] for i in range(3)]
IMAGES = normal(9, 4, 64, 64, 3)


def test_a_region_holds_an_array_of_positions_for_each_axis():
    program = Program(inline_all(jax.make_jaxpr(lambda x: pooled(jnp.tanh(x)))(IMAGES)))
    active = {v for eqn in program.eqns for v in eqn.outvars}
    for compiler, held in ((CPU, 4 * 4 * IMAGES.size), (GPU, 0)):
        node = build_cost_graph(program, active, compiler=compiler).nodes[-1]
        assert node.held_bytes == held and node.may_stand_outside == bool(held)
        assert build_cost_graph(program, active, in_loop=True).nodes[-1].held_bytes == 0


def by_hand(params, x):
    return network(params, x, jax.checkpoint(block))


@pytest.mark.slow
def test_a_budget_that_a_function_fits_as_it_is_written_is_not_refused():
    least = peak_bytes(by_hand, PARAMS, IMAGES)
    plan = jrc.plan(by_hand, PARAMS, IMAGES, budget=least, chunks=False)
    assert plan.verified.peak_bytes <= least


@pytest.mark.slow
def test_windows_stand_outside_of_regions_where_they_do_by_hand():
    within = jax.checkpoint(lambda x, kernels: pooled(block(x, kernels)))

    def with_windows(params, x):
        for kernels in params:
            x = within(x, kernels)
        return jnp.mean(x**2)

    least, most = (peak_bytes(fn, PARAMS, IMAGES) for fn in (by_hand, with_windows))
    plan = jrc.plan(network, PARAMS, IMAGES, budget=0.0, chunks=False)
    assert 1.3 * least < most
    assert plan.verified.peak_bytes < 1.15 * least
