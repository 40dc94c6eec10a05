"""What the command line's options mean: arguments of `jrc.plan`, budgets, paths."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from jrc import remat
from jrc._targets import target as target_named
from jrc.cli._load_target import UsageError


def gradient_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is differentiated and the target, as `jrc.plan` takes them.

    Raises:
        UsageError: If an option is wrong, or there is more than one target.
    """
    names = targets_of(options)
    if len(names) > 1:
        raise UsageError(
            f"--target must be one accelerator, got {', '.join(names)}. Run "
            f"`jrc {options.command}` once for each."
        )
    return differentiated(options) | (target_option(names[0]) if names else {})


def differentiated(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is differentiated, as `jrc.plan` and `jrc.explain` take it."""
    if options.argnums == "none" and options.has_aux:
        raise UsageError("--has-aux must go with a gradient, got --argnums none. Leave one out.")
    if options.argnums == "none":
        return {"argnums": None}
    try:
        numbers = tuple(int(n) for n in options.argnums.split(","))
    except ValueError:
        raise UsageError(
            "--argnums must be one position or several, such as 0 or 0,2, or none, got "
            f"{options.argnums!r}."
        ) from None
    argnums = numbers[0] if len(numbers) == 1 else numbers
    return {"argnums": argnums, "has_aux": options.has_aux}


def targets_of(options: argparse.Namespace) -> list[str]:
    """Return the names of the targets that are asked for: `v5e:1, h100` are two."""
    if options.accelerator is None:
        return []
    names = [target_named(text.strip()).name for text in options.accelerator.split(",")]
    if len(set(names)) < len(names):
        raise UsageError(
            f"--target must name each accelerator once, got {', '.join(names)}. Leave one out."
        )
    return names


def target_option(name: str) -> dict[str, Any]:
    """Return the target with its compiler started, as `jrc.plan` and `jrc.explain` take it."""
    there = target_named(name)
    try:
        len(there.devices)  # starts the compiler, before anything is traced
    except ImportError as error:
        raise UsageError(f"--target: {error}") from None
    return {"target": there}


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


def tolerance_of(text: str | None, against: str | None) -> Callable[[int], int]:
    """Return by how many bytes a peak of so many may grow: `2%` if not given, or bytes."""
    if text is not None and against is None:
        raise UsageError("--tolerance must go with --against, an earlier report. Leave it out.")
    text = text or "2%"
    found = re.fullmatch(r"\s*([\d.]+)\s*%\s*", text)
    try:
        if found:
            share = float(found[1]) / 100
            return lambda peak: int(share * peak)
        size = 0 if text.strip() == "0" else remat.checked_reserve(text)
    except (TypeError, ValueError):
        raise UsageError(
            f"--tolerance must be a share, 2%, or bytes, 64MiB, got {text!r}."
        ) from None
    return lambda _: size
