"""Checks of what a user's own selector, wire format or exchange returns, while it is traced."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jrc.dgc._entries import Entries


def check_kind(value: Any, kind: type, what: str, maker: object, remedy: str) -> None:
    """Raise a `TypeError` unless `value` is of a class of `jrc.dgc`.

    Args:
        value: What the object returned.
        kind: The class that the protocol names.
        what: Its name for the error: `selector.choose(...)`.
        maker: The object, for the error.
        remedy: The way out, a sentence.
    """
    if not isinstance(value, kind):
        raise TypeError(
            f"{what} must be a jrc.dgc.{kind.__name__}, got {_kind(value)} from {maker!r}. {remedy}"
        )


def check_array(
    array: Any, shape: tuple[int, ...], dtype: str, what: str, maker: object, remedy: str
) -> None:
    """Raise a `ValueError` unless `array` is an array of a shape and a dtype."""
    is_array = isinstance(array, jax.Array | np.ndarray)
    if not is_array or array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"{what} must be {dtype}{list(shape)}, got {_kind(array)} from {maker!r}. {remedy}"
        )


def check_entries(entries: Any, count: int | None, what: str, maker: object, remedy: str) -> None:
    """Raise unless `entries` are `Entries` with float32 values and uint32 positions.

    Args:
        entries: What the object returned.
        count: How many there must be; `None` is as many positions as there are values.
        what: Their name for the error.
        maker: The object, for the error.
        remedy: The way out, a sentence.

    Raises:
        TypeError: If they are no `Entries`.
        ValueError: If an array has another shape or dtype.
    """
    check_kind(entries, Entries, what, maker, remedy)
    shape = (np.size(entries.values) if count is None else count,)
    for name, array, dtype in zip(Entries._fields, entries, ("float32", "uint32"), strict=True):
        check_array(array, shape, dtype, f"{what}.{name}", maker, remedy)


def check_counts(
    counts: Any, leaves: int, total: int, what: str, maker: object, remedy: str
) -> None:
    """Raise a `ValueError` unless `counts` are `None`, or one for each leaf with a known sum."""
    if counts is None:
        return
    if not isinstance(counts, Sequence) or len(counts) != leaves or sum(counts) != total:
        raise ValueError(
            f"{what} must be None or {leaves} numbers, one for each leaf, with the sum "
            f"{total}, got {counts!r} from {maker!r}. {remedy}"
        )


def check_unique(positions: Any, end: int, what: str, maker: object, remedy: str) -> None:
    """Raise a `ValueError` if a position below `end` comes twice. Under `jit` none is known."""
    is_jax = isinstance(positions, jax.Array)
    if isinstance(positions, jax.core.Tracer) or (is_jax and not positions.is_fully_addressable):
        return
    known = np.asarray(positions)
    found, times = np.unique(known[known < end], return_counts=True)
    if (times > 1).any():
        raise ValueError(
            f"{what}.positions must be unique, got {found[times.argmax()]} "
            f"{times.max()} times from {maker!r}. {remedy}"
        )


def _kind(value: Any) -> str:
    """Return an array's dtype and shape, or the type of another value: `float32[68]`, `list`."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
