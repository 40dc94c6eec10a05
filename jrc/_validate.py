"""Checks of arguments: one function for each kind of value, one grammar for what it raises.

An error has the rule, what arrived, and the way out; `jrc._errors.public` puts the name of the
public function in front.

>>> whole_number(0, "accumulate", least=1, remedy="Leave it out for 1.")
Traceback (most recent call last):
ValueError: accumulate must be a whole number >= 1, got 0. Leave it out for 1.
"""

import difflib
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrc._errors import listed


def is_whole(value: object) -> bool:
    """Whether this is an integer of Python's or NumPy's, and not a bool."""
    return not isinstance(value, bool | np.bool_) and isinstance(value, int | np.integer)


def is_real(value: object) -> bool:
    """Whether this is a real number of Python's or NumPy's, and not a bool."""
    return is_whole(value) or isinstance(value, float | np.floating)


def check_flag(value: object, name: str) -> None:
    """Raise if `value` is not a bool: a word such as `"no"` would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}. Write {name}=True.")


def whole_number(
    value: Any,
    name: str,
    *,
    least: int | None = None,
    most: int | None = None,
    remedy: str = "",
) -> int:
    """Return `value` as an `int` after checking its type and its range.

    Args:
        value: What a user passed: an `int`, a NumPy integer or another object with `__index__`.
        name: The argument, for the error.
        least: The smallest number allowed.
        most: The largest number allowed.
        remedy: The way out, a sentence.

    Returns:
        The number.

    Raises:
        TypeError: If it is no whole number, a `bool` included.
        ValueError: If it is out of range.
    """
    rule = f"{name} must be a whole number{_range_text(least, most)}"
    is_bool = isinstance(value, bool | np.bool_)
    try:
        number = None if is_bool else operator.index(value)
    except TypeError:  # a float, a text, an array that is traced
        number = None
    if number is None:
        raise TypeError(_sentence(f"{rule}, got {value!r}", remedy))
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(_sentence(f"{rule}, got {number}", remedy))
    return number


def finite_number(value: Any, name: str, *, positive: bool = False, remedy: str = "") -> float:
    """Return `value` as a `float` that is finite and not negative, or positive.

    Args:
        value: What a user passed: a real number of Python's or NumPy's.
        name: The argument, for the error.
        positive: Whether zero is refused.
        remedy: The way out, a sentence.

    Returns:
        The number.

    Raises:
        TypeError: If it is no real number.
        ValueError: If it is negative, infinite, not a number, or zero where it must be positive.
    """
    rule = f"{name} must be a finite number {'> 0' if positive else '>= 0'}"
    if not is_real(value):
        raise TypeError(_sentence(f"{rule}, got {value!r}", remedy))
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(_sentence(f"{rule}, got {value!r}", remedy))
    return float(value)


def scalar(
    value: Any,
    name: str,
    *,
    rule: str = "",
    holds: Callable[[Any], bool] = lambda number: True,
    remedy: str = "",
) -> Any:
    """Return `value` if it is a finite number or a scalar array in a range; a tracer passes.

    Args:
        value: What a user passed: a real number, or a scalar array such as a hyperparameter that a
            schedule injects.
        name: The argument, for the error.
        rule: The range, for the error: `in [0, 1)`.
        holds: Whether a number is in the range.
        remedy: The way out, a sentence.

    Returns:
        The value as it is.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is known and out of range or not finite.
    """
    if isinstance(value, jax.core.Tracer):
        return value
    rule = f"a finite number {rule}".rstrip()
    text = _sentence(f"{name} must be {rule}, got {value!r}", remedy)
    if not (is_real(value) or isinstance(value, jax.Array | np.ndarray)) or jnp.ndim(value):
        raise TypeError(text)
    if not (math.isfinite(value) and holds(value)):
        raise ValueError(text)
    return value


def one_of(value: Any, name: str, choices: Iterable[str]) -> str:
    """Return `value` if it is one of the names in `choices`.

    Raises:
        ValueError: If it is anything else.

    >>> one_of("fluidd", "rule", ("partition", "fluid"))
    Traceback (most recent call last):
    ValueError: rule must be one of 'partition', 'fluid', got 'fluidd'. Write rule='fluid'.
    """
    known = tuple(choices)
    if isinstance(value, str) and value in known:
        return value
    close = difflib.get_close_matches(value.lower(), known, n=1) if isinstance(value, str) else []
    raise ValueError(
        f"{name} must be one of {listed(known)}, got {value!r}. "
        f"Write {name}={(*close, *known)[0]!r}."
    )


def _range_text(least: int | None, most: int | None) -> str:
    if least is None:
        return "" if most is None else f" <= {most}"
    return f" >= {least}" if most is None else f" from {least} to {most}"


def _sentence(fact: str, remedy: str) -> str:
    return f"{fact}. {remedy}" if remedy else f"{fact}."
