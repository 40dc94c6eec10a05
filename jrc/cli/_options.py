"""What the command line's options mean: arguments of `jrc.plan`, budgets, paths."""

import argparse
import re
from typing import Any

from jrc import remat
from jrc._targets import target as target_named
from jrc.cli._load_target import UsageError


def gradient_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is differentiated and the target, as `jrc.plan` and `jrc.explain` take them."""
    try:
        numbers = tuple(int(n) for n in options.argnums.split(","))
    except ValueError:
        raise UsageError(
            f"--argnums must be one position or several, such as 0 or 0,2, got {options.argnums!r}."
        ) from None
    argnums = numbers[0] if len(numbers) == 1 else numbers
    asked = {"argnums": argnums, "has_aux": options.has_aux}
    if options.accelerator is None:
        return asked
    there = target_named(options.accelerator)
    try:
        len(there.devices)  # starts the compiler, before anything is traced
    except ImportError as error:
        raise UsageError(f"--target: {error}") from None
    return asked | {"target": there}


def budget_of(text: str | None) -> int | float | str | None:
    """Return bytes, or a fraction for a number with a point: `2e9` is a number of bytes."""
    if text is None:
        return None
    text = text.strip()
    if text in ("0", "1"):
        raise UsageError(
            f"--budget must be a size or a fraction, got {text}, which is a number of bytes. Write "
            f"{text}.0 for the fraction."
        )
    if re.search(r"[\d.][eE]\+?\d", text):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_paths(json: str | None, plot: str | None = None) -> None:
    """Raise if the results cannot be written, before anything is compiled."""
    for option, path, check in (
        ("--json", json, remat.check_writable),
        ("--plot", plot, remat.check_picture),
    ):
        try:
            if path is not None:
                check(path)
        except (ImportError, OSError, ValueError) as error:
            raise UsageError(f"{option}: {error}") from None
