"""Functions of Python that programs for absent accelerators call."""

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jrc
from jrc.remat._gradient.compiled_memory import compiled_to_look_at
from tests.processes import run_python
from tests.targets.test_target import needs_cuda, needs_libtpu

ROWS, WIDTH = 4096, 256
BOTH = [pytest.param("v5e", marks=needs_libtpu), pytest.param("h100", marks=needs_cuda)]


def debug_print(x):
    jax.debug.print("{}", x.sum())
    return x


def debug_callback(x):
    jax.debug.callback(lambda x: None, x.sum(), ordered=True)
    return x


def io_callback(x):
    jax.experimental.io_callback(lambda x: None, None, jax.lax.stop_gradient(x).sum())
    return x


def pure_callback(x):
    return x + jax.pure_callback(np.sin, x, jax.lax.stop_gradient(x))


def loss_with(callback):
    def loss(weights, x):
        def layer(x, w):
            return callback(jnp.tanh(x @ w)), None

        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    return loss


def shapes(rows, mesh=None):
    kind = (NamedSharding(mesh, PartitionSpec(*each)) for each in ((), ("data",))) if mesh else ()
    weights, x = kind or (None, None)
    return (
        jax.ShapeDtypeStruct((8, WIDTH, WIDTH), jnp.float32, sharding=weights),
        jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32, sharding=x),
    )


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("callback", [debug_print, debug_callback, io_callback, pure_callback])
def test_a_loss_with_a_callback_is_compiled(target, callback):
    plain = jrc.explain(loss_with(lambda x: x), *shapes(ROWS), target=target).memory
    found = jrc.explain(loss_with(callback), *shapes(ROWS), target=target).memory
    assert found.arguments == plain.arguments
    # The same activations, and of `pure_callback` one in and one out besides.
    layer = 4 * ROWS * WIDTH
    assert plain.peak - layer <= found.peak <= plain.peak + 3 * layer


@needs_cuda
@pytest.mark.parametrize("callback", [debug_print, io_callback, pure_callback])
def test_a_callback_on_several_gpus_runs_on_one(callback):
    mesh = jax.make_mesh((4,), ("data",), devices=jrc.target("h100:4").devices)
    text = jax.jit(loss_with(callback)).lower(*shapes(ROWS, mesh)).compile().as_text()
    calls = [line for line in text.splitlines() if "xla_ffi_python_gpu_callback" in line]
    assert len(calls) == 1
    if callback is pure_callback:  # which is given the whole value
        assert f"f32[{ROWS},{WIDTH}]" in calls[0] and "all-gather" in text


@needs_cuda
def test_a_plan_is_made_around_a_callback():
    args = shapes(16 * ROWS)
    plan = jrc.plan(loss_with(debug_print), *args, budget=0.3, target="h100")
    whole = jrc.explain(loss_with(debug_print), *args, target="h100").memory.peak
    assert plan.verified.peak_bytes < whole


def test_a_client_that_refuses_callbacks_is_explained():
    class Lowered:
        def compile(self, compiler_options):
            raise TypeError("compile(): incompatible function arguments. ... host_callbacks: ...")

    with pytest.raises(RuntimeError, match="Hide it with the environment variable JAX_PLATFORMS"):
        compiled_to_look_at(Lowered(), "gpu")


@needs_cuda
def test_devices_of_a_target_start_no_backend():
    """JAX's settings, and `jax.distributed.initialize`, can still follow."""
    code = (
        "import jax, jrc; jrc.target('h100').devices; "
        "jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices()))"
    )
    assert run_python(code, XLA_FLAGS="").split()[-1] == "3"


@needs_cuda
@pytest.mark.parametrize("call", ["jax.debug.print('{}', x)", "jax.pure_callback(np.sin, x, x)"])
def test_lowering_for_a_gpu_from_devices_that_are_none_is_refused_as_ever(call):
    code = f"""
import jax, jax.numpy as jnp, jrc, numpy as np

def refused():
    traced = jax.jit(lambda x: {call}).trace(jax.ShapeDtypeStruct((4,), jnp.float32))
    try:
        traced.lower(lowering_platforms=("cuda",))
    except Exception as error:
        return repr(error)

before = refused()
jrc.target("h100").devices
assert before and refused() == before, (before, refused())
"""
    run_python(code)
