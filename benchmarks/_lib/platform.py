"""What every benchmark asks of the machine: the platform to run on, and what it runs on."""

import argparse
import os
from typing import Any

import jax


def add_platform(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", help="cpu, gpu or tpu (default: what JAX finds)")


def use(platform: str | None) -> None:
    """Before anything asks JAX for a device."""
    if platform:
        jax.config.update("jax_platforms", platform)


def device() -> dict[str, Any]:
    """Where bytes and FLOPs come from."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def about() -> dict[str, Any]:
    """Where it is timed, and what else the machine does."""
    return device() | {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
