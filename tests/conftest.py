"""Every test runs on eight CPU devices, with warnings as errors and no silent rank promotion.

XLA's machine code is not optimised, in child processes neither: a third of the suite's time was
spent on that. `XLA_FLAGS= python -m pytest` runs it with the code that users have.
"""

import os

os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
