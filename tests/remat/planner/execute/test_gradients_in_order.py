"""Gradients of weights come before what made the data of a stage is differentiated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from jrc._targets import abstract_on
from jrc.remat._gradient.compiled_memory import memory_needed
from jrc.remat._planner.plan.decision import Region, Stages
from jrc.remat._region.barrier import gradients_in_order
from tests.remat.planner.problems import problem_of
from tests.targets.test_target import needs_cuda


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def block(w, x):
    up, gate, down = w
    return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down


def loss(params, x):
    for w in params:
        x = block(w, x)
    return jnp.mean(x**2)


def accumulated(loss):
    """Value and gradients, the sums of two halves of a batch."""

    def run(params, x):
        def half(sums, part):
            value, grads = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(jnp.add, sums, (value, grads)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(half, zeros, x.reshape(2, -1, x.shape[-1]))[0]

    return run


LAYER = shape(64, 192), shape(64, 192), shape(192, 64)
ARGS = [LAYER] * 4, shape(64, 64)


def lean_on(platform):
    """The options with several regions, the leanest first."""
    problem = problem_of(loss, ARGS, platform=platform)
    found = [each for each in problem.manual if len(each.stages.regions) > 2]
    return problem, min(found, key=lambda each: each.peak)


def drawn(args):
    keys = iter(jax.random.split(jax.random.key(0), 99))
    return tuple(jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape) / 8, args))


@pytest.mark.parametrize(("platform", "in_order"), [("gpu", True), ("tpu", False), ("cpu", False)])
def test_stages_are_in_order_on_gpus(platform, in_order):
    problem, lean = lean_on(platform)
    assert all(each.stages.in_order == in_order for each in (lean, *problem.front))
    without = dataclasses.replace(lean.stages, in_order=False)
    barriers = [
        str(problem.function.gradient(each)).count("optimization_barrier")
        for each in (lean.stages, without)
    ]
    # The first region makes nothing of data that is differentiated.
    behind = sum(not isinstance(each, Region) for each in lean.stages.stages)
    more = len(lean.stages.regions) - 1 + behind
    assert barriers[0] - barriers[1] == (more if in_order else 0)


def test_programs_on_several_devices_have_no_order():
    """There gradients of weights are summed over devices while others are computed."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("data"))
    params, x = ARGS
    args = [params, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split)]
    mapped = jax.shard_map(
        lambda p, x: jax.lax.pmean(loss(p, x), "data"),
        mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(),
    )  # fmt: skip
    for fn, given in ((loss, args), (mapped, ARGS)):
        problem = problem_of(fn, given, platform="gpu")
        options = [each for each in problem.options if isinstance(each.decision, Stages)]
        assert options and not any("in_order=True" in str(each.decision) for each in options)


def test_a_mesh_of_one_device_is_one_device():
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])):
        _, lean = lean_on("gpu")
    assert lean.stages.in_order


def derivatives(fn):
    """Gradients, a derivative in forward mode, and second derivatives in one direction."""
    args = drawn(ARGS)
    grad = jax.grad(fn, argnums=(0, 1))
    return grad(*args), jax.jvp(fn, args, args), jax.jvp(grad, args, args)


@pytest.mark.slow
def test_derivatives_are_those_without():
    problem, lean = lean_on("gpu")
    found, expected = map(derivatives, (problem.function.applied(lean.stages), loss))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


def test_frozen_weights_have_no_gradient():
    """Only what flows is behind the barrier, and there is none of one gradient alone."""

    def of(x, w, frozen):
        x, w, frozen = gradients_in_order([x, w, frozen])
        return jnp.sum(jnp.tanh(x @ w) @ frozen)

    x, w, frozen = (jnp.ones((4, 4)) for _ in range(3))
    for argnums, count in ((0, 0), (1, 0), ((0, 1), 1), ((0, 1, 2), 1)):
        text = str(jax.make_jaxpr(jax.grad(of, argnums))(x, w, frozen))
        assert text.count("optimization_barrier") == count
    text = str(jax.make_jaxpr(jax.grad(of, (0, 1)))(x, w, frozen))
    assert text.count("dot_general") == 2 + 3  # none for the frozen weights
    batched = jax.vmap(jax.grad(of, (0, 1)), in_axes=(0, None, None))(x[None], w, frozen)
    for one, other in zip(batched, jax.grad(of, (0, 1))(x, w, frozen), strict=True):
        np.testing.assert_allclose(one[0], other, rtol=1e-6)


def shared(params, x):
    """The same weights in each layer."""
    for _ in range(6):
        x = block(params, x)
    return jnp.mean(x**2)


def stacked(params, x):
    """Each layer takes its part of stacked weights."""
    for i in range(6):
        x = block([w[i] for w in params], x)
    return jnp.mean(x**2)


WIDE = shape(256, 1024), shape(256, 1024), shape(1024, 256)
STACKED = tuple(shape(6, *w.shape) for w in WIDE)


@pytest.mark.exhaustive(after=1)
@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "params", "most"),
    [
        pytest.param(loss, [WIDE] * 6, 0.6, id="a weight for each layer"),
        pytest.param(shared, WIDE, 0.6, id="shared weights"),
        pytest.param(stacked, STACKED, 1.05, id="stacked weights"),
    ],
)
def test_operands_of_all_layers_are_not_kept_for_products_that_are_put_off(loss, params, most):
    """Where gradients are summed in a loop XLA for GPUs computes those of weights last of all.

    Of stacked weights nothing is in order: a gradient of the whole stack for each layer would be.
    """
    problem = problem_of(loss, (params, shape(4096, 256)), platform="gpu")
    found = [each for each in problem.manual if len(each.stages.regions) > 4]
    lean = min(found, key=lambda each: each.peak)
    needed = []
    for decision in (lean.stages, dataclasses.replace(lean.stages, in_order=False)):
        run = accumulated(problem.function.applied(decision))
        args = abstract_on(jrc.target("h100"), (params, shape(8192, 256)))
        needed.append(memory_needed(jax.jit(run).lower(*args), "gpu").temporaries)
    assert needed[0] < most * needed[1]


def test_gradients_can_be_added_to_references():
    def of(w, x):
        x, w = gradients_in_order([jnp.sin(x), w])
        return jnp.sum((x @ w) ** 2)

    w, x = jnp.ones((3, 3)), jnp.ones((2, 3))
    _, backward = jax.vjp(of, w, x)
    refs = [jax.new_ref(jnp.zeros_like(each)) for each in (w, x)]
    backward.with_refs(*refs)(jnp.ones(()))
    for ref, each in zip(refs, jax.grad(of, (0, 1))(w, x), strict=True):
        np.testing.assert_allclose(ref[...], each, rtol=1e-6)
