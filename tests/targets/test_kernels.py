"""Pallas kernels in programs for absent accelerators."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import jrc
from tests.targets.test_target import needs_cuda, needs_libtpu


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


@needs_libtpu
@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:1"])
def test_a_kernel_finds_the_chip_that_it_is_compiled_for(target):
    found = []

    def loss(w, x):
        found.append(pltpu.get_tpu_info().chip_version.value)
        return jnp.mean((x @ w) ** 2)

    jrc.explain(loss, shape(128, 128), shape(256, 128), target=target)
    jrc.plan(loss, shape(128, 128), shape(256, 128), budget=1.0, target=target)
    jrc.largest_batch(lambda n: (shape(128, 128), shape(n, 128)), loss, "10MiB", target=target)
    assert set(found) == {target.partition(":")[0]}


@needs_libtpu
def test_a_mesh_that_is_set_stays():
    to = jrc.target("v5e:1")
    mesh = jax.make_mesh((1,), ("rows",), devices=to.devices)
    found = []

    def loss(w, x):
        found.append(jax.sharding.get_abstract_mesh().axis_names)
        return jnp.mean((x @ w) ** 2)

    with jax.set_mesh(mesh):
        jrc.explain(loss, shape(128, 128), shape(256, 128), target=to)
    assert set(found) == {("rows",)}


@needs_libtpu
def test_flash_attention_is_planned_for_a_tpu():
    """A kernel with several results and scratch memory: its program has many more inputs."""
    tokens, heads, width = 512, 2, 128

    def loss(weights, x):
        for w in weights:
            q, k, v = jnp.split((x @ w).reshape(4, tokens, heads, 3 * width), 3, axis=-1)
            q, k, v = (jnp.swapaxes(each, 1, 2) for each in (q, k, v))
            out = flash_attention(q, k, v, causal=True)
            x = x + jnp.swapaxes(out, 1, 2).reshape(x.shape)
        return jnp.mean(x**2)

    args = [shape(heads * width, 3 * heads * width)] * 3, shape(4, tokens, heads * width)
    plan = jrc.plan(loss, *args, budget=0.0, target="v5e", verify=False)
    report = jrc.explain(plan.apply(loss), *args, target="v5e")
    assert plan.predicted.flops_ratio > 1 and report.memory.peak > 0


@needs_cuda
def test_a_kernel_of_triton_is_compiled_for_an_absent_gpu():
    """It is lowered for a compute capability, that of the device which it finds."""

    @jax.custom_vjp
    def doubled(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return pl.pallas_call(
                lambda x, y: y.__setitem__(..., 2 * x[...]),
                out_shape=x,
                compiler_params=pltriton.CompilerParams(),
            )(x)

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))

    def loss(w, x):
        return jnp.mean(doubled(x @ w) ** 2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        peaks = [
            jrc.explain(loss, shape(64, 64), shape(64, 64), target=target).memory.peak
            for target in ("h100", "h100:2")
        ]
    assert peaks[0] == peaks[1] > 3 * 64 * 64 * 4
