"""Packages that only some functions need; the others do without them."""

import importlib
from typing import Any

_EXTRAS = {"flax": "flax", "orbax.checkpoint": "orbax"}
"""The extra of jrc that installs the package of each module."""


def needed(module: str) -> Any:
    """Return a module, such as `orbax.checkpoint`.

    Raises:
        ModuleNotFoundError: If its package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # something that the package itself needs
        raise ModuleNotFoundError(
            f"{package} must be installed. Run pip install '.[{_EXTRAS[module]}]' in a checkout.",
            name=error.name,
        ) from None
