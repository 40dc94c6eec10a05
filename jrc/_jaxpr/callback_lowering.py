"""Lower calls of Python functions for a platform that this process does not have.

`jax.debug.print`, `jax.pure_callback` and `jax.experimental.io_callback` ask for the backend that
will run them, and a client that only compiles takes no Python functions. The program for an absent
GPU has the same custom call, with the same operands and results, and no function behind it. The
client of an absent TPU takes them as they are.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

_CALL = "xla_ffi_python_gpu_callback"
_CALL_OF_EACH_PART = "xla_ffi_partitioned_python_gpu_callback"


@functools.cache
def lower_callbacks_for_absent_gpus() -> None:
    """From here on lower callbacks for GPUs that only compile without their functions.

    Programs for other devices are lowered, or refused, as without this. Where JAX has a GPU its
    callbacks stay as they are, for the programs that run on it.
    """
    if not _may_have_a_gpu():
        for primitive in _primitives():
            mlir.register_lowering(primitive, _without_function, platform="cuda")


def _may_have_a_gpu() -> bool:
    """Whether JAX may find a GPU, by its settings and the machine's devices; starts no backend."""
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return any(any(pathlib.Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "dxg"))


def _primitives() -> list[Primitive]:
    """Return JAX's primitives that call Python."""

    def calls(x: jax.Array) -> Any:
        jax.debug.callback(lambda x: None, x)
        jax.debug.print("{}", x)
        jax.experimental.io_callback(lambda x: None, None, x)
        return jax.pure_callback(lambda x: x, x, x)

    jaxpr = jax.make_jaxpr(calls)(jax.ShapeDtypeStruct((), jnp.float32))
    return list({eqn.primitive: None for eqn in jaxpr.eqns})


def _without_function(ctx: Any, *operands: Any, **params: Any) -> Any:
    client = ctx.module_context.backend
    if client is None or client.platform not in ("cuda", "gpu"):
        ctx.module_context.get_backend()  # raises, as in JAX's own rule
    if ctx.tokens_in:  # of an ordered callback
        ctx.set_tokens_out(ctx.tokens_in)
    is_split = params.get("partitioned", False)
    lower = jax.ffi.ffi_lowering(
        _CALL_OF_EACH_PART if is_split else _CALL,
        has_side_effect=ctx.primitive.name != "pure_callback",
        extra_attributes=None if is_split else _on_first_device(ctx),
    )
    return lower(ctx, *operands, index=np.uint64(0))


def _on_first_device(ctx: Any) -> dict[str, Any] | None:
    """Return the sharding of a callback under `jax.jit`: the first device has all of each value."""
    if not isinstance(ctx.module_context.axis_context, mlir.ShardingContext):
        return None
    if not jax.config.jax_use_shardy_partitioner:
        return {"mhlo.sharding": mlir.ir.StringAttr.get("{maximal device=0}")}
    each = "<mesh<[], device_ids=[0]>, []>"
    several = ", ".join([each] * max(1, len(ctx.avals_out)))
    return {"sdy.sharding": mlir.ir.Attribute.parse(f"#sdy.sharding_per_value<[{several}]>")}
