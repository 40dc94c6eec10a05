"""Plans in a folder: the plan for a program is found again by the program's fingerprint.

A file's name is a hash of all that a plan follows from: the program, the placement of its inputs,
what was asked of `jrc.plan`, the versions of jrc, JAX and the compilers, the device, and XLA's
flags.
"""

import hashlib
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jrc._targets import compiler_versions
from jrc._version import __version__
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.program.signature import Signature
from jrc.remat._planner.settings import SETTINGS

_logger = logging.getLogger("jrc")


def check_cache(cache: Any) -> None:
    """Raise unless plans can be stored under this path.

    Raises:
        TypeError: If it is neither `None` nor a path.
        ValueError: If it is no folder and cannot become one.
    """
    if cache is None:
        return
    if not isinstance(cache, str | os.PathLike):
        raise TypeError(
            f'cache must be the path of a folder, got {type(cache).__name__}. Write cache="plans".'
        )
    try:
        pathlib.Path(cache).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cache must be a folder that can be written, got {str(cache)!r} ({error}). "
            "Name another folder, or leave cache out."
        ) from error


def plan_in(
    folder: str | os.PathLike[str],
    signature: Signature,
    inputs: Any,
    asked: Mapping[str, Any],
    find: Callable[[], Plan],
) -> Plan:
    """Return the plan that a folder has for a program; else find one, and store it there.

    Args:
        folder: The folder; it is made if it is not there.
        signature: Of the program.
        inputs: Its arguments, whose placement enters.
        asked: The arguments of `jrc.plan` that the plan follows from.
        find: Finds the plan.
    """
    path = pathlib.Path(folder) / f"{_key(signature, inputs, asked)}.json"
    if path.exists():
        try:
            plan = Plan.from_json(path.read_text())
        except (OSError, ValueError) as error:
            _logger.warning("jrc.plan: %s is no plan and is replaced (%s)", path, error)
        else:
            if (plan.whole or plan.signature) == signature:
                _logger.info("jrc.plan: found in %s", path)
                return plan
    plan = find()
    if jax.process_index() == 0:
        try:
            _write(path, plan.to_json())
        except OSError as error:
            _logger.warning("jrc.plan: the plan was not stored (%s)", error)
    return plan


def _key(signature: Signature, inputs: Any, asked: Mapping[str, Any]) -> str:
    device = jax.devices()[0]
    data = {
        "program": [signature.digest, signature.respect_checkpoints, signature.closed],
        "inputs": signature.inputs,
        "placement": [str(getattr(x, "sharding", None)) for x in jax.tree.leaves(inputs)],
        "asked": asked,
        "versions": [__version__, compiler_versions(), repr(SETTINGS)],
        "device": [device.platform, device.device_kind, jax.device_count()],
        "flags": [os.environ.get("XLA_FLAGS", ""), bool(getattr(jax.config, "jax_remat3", False))],
    }
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write(path: pathlib.Path, text: str) -> None:
    """Write a file that is whole as soon as it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
