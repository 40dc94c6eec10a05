"""What the planner assumes of each platform's compiler; one file has the facts of one compiler.

>>> import jax, jax.numpy as jnp
>>> column = jax.ShapeDtypeStruct((4096, 1), jnp.float32)
>>> compiler_on("cpu").array_bytes(column), compiler_on("tpu").array_bytes(column)
(16384, 16384)
>>> compiler_on("tpu").array_bytes(jax.ShapeDtypeStruct((256, 9, 40), jnp.bfloat16))
221184
"""

from jrc.remat._planner.costs.compilers.compiler import Compiler as Compiler
from jrc.remat._planner.costs.compilers.compiler import WithoutBarrier as WithoutBarrier
from jrc.remat._planner.costs.compilers.cpu import CPU as CPU
from jrc.remat._planner.costs.compilers.gpu import GPU as GPU
from jrc.remat._planner.costs.compilers.tpu import TPU as TPU


def compiler_on(platform: str) -> Compiler:
    """Return the assumptions for a platform; those of a CPU for one that is not known."""
    return {"gpu": GPU, "cuda": GPU, "rocm": GPU, "tpu": TPU}.get(platform, CPU)
