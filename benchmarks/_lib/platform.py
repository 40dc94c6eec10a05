"""The platform to run on, and the facts about the machine in a report."""

import os
import sys
from typing import Any

import jax


def use(platform: str | None) -> None:
    """Choose the platform; must come before anything asks JAX for a device."""
    if platform:
        jax.config.update("jax_platforms", platform)


def require_devices(count: int, who: str) -> None:
    """Provide `count` devices, virtual ones on a CPU; must come before JAX starts.

    Raises:
        SystemExit: If there are fewer.
    """
    if jax.config.jax_num_cpu_devices < count:
        jax.config.update("jax_num_cpu_devices", count)
    if (found := len(jax.devices())) < count:
        sys.exit(
            f"{who}: {count} replicas need as many devices, got {found}. Use --platform cpu, where "
            "devices are virtual."
        )


def device() -> dict[str, Any]:
    """Return the device's kind and the version of JAX, which bytes and FLOPs depend on."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def host() -> dict[str, Any]:
    """Return the number of cores and the load, which times depend on."""
    return {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}


def machine() -> dict[str, Any]:
    """Return device, JAX's version, cores and load."""
    return device() | host()
