"""Chunks that follow each other in the program: what convolves, on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from jrc._jaxpr import Program, inline_all
from jrc.remat._chunks.regions_within import regions_within
from jrc.remat._chunks.steps import in_loop, in_turn
from jrc.remat._gradient.compiled_memory import memory_needed
from jrc.remat._planner.costs.compilers import compiler_on

KEY = jax.random.key(0)


def convolve(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def network(params, images, labels):
    x = images
    for kernel in params["kernels"]:
        x = jax.nn.gelu(convolve(x, kernel))
    logits = jnp.mean(x, axis=(1, 2)) @ params["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -jnp.mean(picked)


def arguments(batch=32, width=8):
    keys = jax.random.split(KEY, 4)
    sizes = [(3, 3, n, width) for n in (3, width, width)]
    kernels = [0.2 * jax.random.normal(k, s) for k, s in zip(keys, sizes, strict=False)]
    params = {"kernels": kernels, "head": jax.random.normal(keys[3], (width, 10))}
    images = jax.random.normal(keys[0], (batch, 16, 16, 3))
    return params, images, jnp.arange(batch) % 10


def compiled(fn, *args):
    lowered = jax.jit(fn).lower(*args)
    return lowered.compile().as_text(), memory_needed(lowered).peak


def test_steps_in_turn_carry_and_stack_what_a_scan_does():
    def body(state, x, scale):
        key, rows = x
        total = state["total"] + jnp.sum(scale * rows * jax.random.uniform(key, rows.shape))
        return {"total": total, "steps": state["steps"] + 1}, (rows * total, {})

    xs = jax.random.split(KEY, 5), jnp.arange(20.0).reshape(5, 4)
    start = {"total": jnp.zeros(()), "steps": 0}
    found, expected = in_turn(body, start, xs, 2.0), in_loop(body, start, xs, 2.0)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)


@pytest.mark.parametrize("reads", [0, 1], ids=["carried", "stacked"])
def test_steps_in_turn_need_the_memory_of_one(reads):
    """Also backwards, and where nothing is carried."""

    def run(w, xs, scan):
        @jax.checkpoint
        def body(total, x, w):
            wide = jnp.tanh(jnp.outer(x, w))
            return total + reads * jnp.sum(wide), (1 - reads) * jnp.sum(wide, axis=0)

        total, rows = scan(body, jnp.zeros(()), xs, w)
        return total + jnp.sum(rows)

    w, xs = jnp.linspace(0, 1, 4096), jnp.linspace(0, 1, 8 * 256).reshape(8, 256)
    whole = 8 * 256 * 4096 * 4
    for fn in (run, jax.value_and_grad(run)):
        _, peak = compiled(lambda w, xs, fn=fn: fn(w, xs, in_turn), w, xs)
        assert peak < 0.5 * whole
    gradient = jax.grad(run)(w, xs, in_turn)
    np.testing.assert_allclose(gradient, jax.grad(run)(w, xs, in_loop), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [32, 30])
def test_what_convolves_runs_in_chunks_without_a_loop_on_a_cpu(batch):
    args = arguments(batch)
    whole, before = compiled(jax.value_and_grad(network), *args)
    plan = jrc.plan(network, *args, budget=before // 3)
    assert plan.chunks and all(each.are_in_turn for each in plan.chunks)
    assert jrc.Plan.from_json(plan.to_json()) == plan
    gradient = jax.value_and_grad(plan.apply(network))
    text, peak = compiled(gradient, *args)
    assert peak <= before // 3
    assert " while(" not in text and text.count(" convolution(") >= whole.count(" convolution(")
    for found, expected in zip(
        jax.tree.leaves(gradient(*args)),
        jax.tree.leaves(jax.value_and_grad(network)(*args)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, atol=2e-6 * float(jnp.abs(expected).max()))


@pytest.mark.slow
def test_a_function_as_it_is_convolves_in_turn_on_a_cpu():
    def norms(params, images, labels):
        one = jax.vmap(jax.grad(network), in_axes=(None, 0, 0))
        gradients = one(params, images[:, None], labels[:, None])
        return sum(jnp.sum(g**2, axis=range(1, g.ndim)) for g in jax.tree.leaves(gradients))

    args = arguments()
    _, before = compiled(norms, *args)
    plan = jrc.plan(norms, *args, budget=before // 3, argnums=None)
    assert plan.chunks and all(each.are_in_turn for each in plan.chunks)
    _, peak = compiled(plan.apply(norms), *args)
    assert peak <= before // 3
    np.testing.assert_allclose(plan.apply(norms)(*args), norms(*args), rtol=1e-5)


def test_many_chunks_and_those_of_accelerators_run_in_a_loop():
    program = Program(inline_all(jax.make_jaxpr(network)(*arguments())))
    (region,) = regions_within(program, narrow=2**14)
    few, many = 2**18, 2**14
    assert region.chunks(few, most_in_turn=16).are_in_turn
    assert region.chunks(many, most_in_turn=16).chunks > 16
    assert not region.chunks(many, most_in_turn=16).are_in_turn
    assert not region.chunks(few, most_in_turn=compiler_on("gpu").most_in_turn).are_in_turn


@pytest.mark.slow
def test_a_loop_is_taken_where_steps_in_turn_need_too_much():
    def variance(kernels, images):
        x = jax.nn.relu(convolve(images, kernels[0]))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jnp.var(convolve(x, kernels[1]).mean((1, 2)), axis=0).sum()

    keys = jax.random.split(KEY, 3)
    kernels = [
        jax.random.normal(keys[0], (3, 3, 3, 12)), jax.random.normal(keys[1], (3, 3, 12, 6))
    ]  # fmt: skip
    args = kernels, jax.random.normal(keys[2], (16, 32, 32, 3))
    _, before = compiled(jax.value_and_grad(variance), *args)
    plan = jrc.plan(variance, *args, budget=before // 4)
    assert [each.are_in_turn for each in plan.chunks] == [False]
    assert plan.verified.peak_bytes <= before // 4


@pytest.mark.slow
def test_on_a_mesh_kernels_have_the_gradients_that_they_have_on_one_device():
    """XLA computes wrong ones of kernels whose parts are mapped over devices."""
    params, images, labels = arguments(48)
    expected = jax.value_and_grad(network)(params, images, labels)
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*names)) for names in (("data",), ()))
    args = jax.device_put(params, whole), *jax.device_put((images, labels), rows)
    plan = jrc.plan(network, *args, budget="60%")
    found = jax.jit(jax.value_and_grad(plan.apply(network)))(*args)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * float(jnp.abs(y).max()))


def test_groups_are_the_slices_that_there_are_by_hand():
    def grouped(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=4,
        )  # fmt: skip

    x, kernel = jnp.ones((2, 6, 6, 12)), jnp.ones((3, 3, 3, 8))
    with pytest.raises(ValueError, match="which has 4, got 12. Write chunks=4"):
        jrc.chunked(grouped, in_axes=(3, 3), out_axes=3, chunks=12)(x, kernel)
    np.testing.assert_allclose(
        jrc.chunked(grouped, in_axes=(3, 3), out_axes=3, chunks=4)(x, kernel), grouped(x, kernel)
    )
