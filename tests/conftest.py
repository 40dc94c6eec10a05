"""Every test runs on eight CPU devices, with warnings as errors and no silent rank promotion."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
