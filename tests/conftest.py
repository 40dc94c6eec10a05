"""Every test runs on eight CPU devices, with warnings as errors and no silent rank promotion.

XLA's machine code is not optimised, in child processes neither: a third of the suite's time was
spent on that. `XLA_FLAGS= python -m pytest` runs it with the code that users have.

Equal programs are compiled once for all workers and child processes: they share a folder of XLA's
results, made for this run alone. That is an eighth of the time.
"""

import os
import tempfile

os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="jrc-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
