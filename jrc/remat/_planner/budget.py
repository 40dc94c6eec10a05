"""Budgets: bytes, a share of the baseline's peak, or a fraction of what can be gained.

>>> checked_budget("1.5GiB"), checked_budget(0.5), checked_budget("60%")
(1610612736, 0.5, Share(of_baseline=0.6))
>>> less_reserve(1000, checked_reserve({"mu": np.zeros(100, np.float32)}))
600
"""

import dataclasses
import operator
import os
import re
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from jrc._targets import Target
from jrc._text import memory_text
from jrc._tree import is_array
from jrc._validate import whole_number
from jrc.remat._gradient.compiled_memory import bytes_on_device, device_of
from jrc.remat._planner.settings import SETTINGS

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
# `15`, `1.5`, `.5`, `1.5e9`.
_NUMBER = r"((?:[0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})(?:e\+?[0-9]{1,2})?)"


_NO_LIMIT = (
    " The device states no limit of its own: device.memory_stats() is None there. For a device "
    "that is not there pass target='h100' or the like."
)
_BUDGET_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Share:
    """A budget that is a share of the baseline's peak.

    Attributes:
        of_baseline: The share, above 0 and at most 1.
    """

    of_baseline: float


Budget = int | float | Share
"""Bytes, a fraction between the least peak and the baseline's, or a share of the latter."""


class BudgetError(ValueError):
    """No plan fits the budget.

    Attributes:
        least_bytes: The least peak, in bytes, that was found or predicted in the search for this
            budget, which may be more than the search for a larger one finds.
        plan: The plan that reaches it, a `jrc.Plan`.
    """

    least_bytes: int
    plan: Any

    def __init__(self, message: str, least_bytes: int, plan: Any = None):
        super().__init__(message)
        self.least_bytes = least_bytes
        self.plan = plan

    def __reduce__(self) -> Any:
        """Pickle with all attributes."""
        return type(self), (str(self), self.least_bytes, self.plan)

    def beside(self, reserve: int) -> "BudgetError":
        """Return the same error, which says that a reserve was taken from the budget."""
        if not reserve:
            return self
        taken = f"{self} From the budget {memory_text(reserve)} were taken, which are reserved."
        return BudgetError(taken, self.least_bytes, self.plan)


def checked_budget(budget: object, name: str = "budget") -> Budget:
    """Return a budget as bytes (`int`), as a fraction (`float` in [0, 1]), or as a `Share`.

    Args:
        budget: What was given.
        name: What the option is called.

    Raises:
        TypeError: If it is neither a number nor text, or is traced.
        ValueError: If it is no size.
    """
    if isinstance(budget, str):
        return _share_of(budget) or _of_text(budget, name)
    if isinstance(budget, jax.core.Tracer):
        raise TypeError(
            f"{name} must be known before anything is traced, got {budget.aval}. Ask for "
            "the plan outside of jax.jit."
        )
    if isinstance(budget, np.generic | np.ndarray | jax.Array) and np.ndim(budget) == 0:
        budget = budget.item()
    if isinstance(budget, float):
        if 0.0 <= budget <= 1.0:
            return budget
        raise ValueError(
            f"{name} as a float must be a fraction in [0, 1] between the least peak (0) and "
            f"that of the baseline (1), got {budget!r}. Write bytes as an int or as text: "
            "int(2e9), '2GiB'."
        )
    try:
        size = None if isinstance(budget, bool) else operator.index(budget)  # type: ignore[arg-type]
    except TypeError:
        size = None
    if size is None:
        raise TypeError(
            f"{name} must be bytes (an int), text ('1.5GiB', '60%') or a fraction (a float in "
            f"[0, 1]), got {type(budget).__name__} {budget!r}. Write '1.5GiB', '60%' or 0.5."
            + (_NO_LIMIT if budget is None else "")
        )
    if size <= 0:
        raise ValueError(
            f"{name} in bytes must be positive, got {size}. Write '1.5GiB', or a fraction "
            "as a float: 0.5."
        )
    return size


def checked_reserve(reserve: object) -> int:
    """Return the bytes on one device that something else needs beside a program.

    Args:
        reserve: Bytes, text (`"2GiB"`), or arrays or shapes in any pytree; `None` is nothing.

    Raises:
        TypeError: If it is something else, or holds something else.
        ValueError: If it is no size.
    """
    if isinstance(reserve, str):
        return _of_text(reserve, "reserve")
    if isinstance(reserve, int | np.integer) and not isinstance(reserve, bool):
        return whole_number(int(reserve), "reserve", least=0, remedy="Write bytes, or '2GiB'.")
    leaves = jax.tree.leaves(reserve)
    for leaf in leaves:
        if not (is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)):
            raise TypeError(
                "reserve must be bytes, text ('2GiB'), or a pytree of arrays or shapes, got "
                f"{type(leaf).__name__} {leaf!r}. Write '2GiB', or jax.eval_shape(tx.init, params)."
            )
    return sum(map(bytes_on_device, leaves))


def less_reserve[B: Budget](budget: B, reserve: int) -> B:
    """Return what a reserve leaves of a budget.

    Raises:
        ValueError: If the budget is not in bytes, or nothing is left.
    """
    if not reserve:
        return budget
    if not isinstance(budget, int):
        raise ValueError(
            "reserve must go with a budget in bytes, from which it is taken, got a fraction or a "
            "share of what the function itself needs. Write budget='16GiB'."
        )
    if reserve >= budget:
        raise ValueError(
            f"reserve must be smaller than the budget, got {memory_text(reserve)} of "
            f"{memory_text(budget)}. Shard the optimizer's state, or use one with a smaller state."
        )
    return budget - reserve  # type: ignore[return-value]


def limit_of(budget: object, target: Target | None, arrays: Any, reserve: int) -> Budget:
    """Return a checked budget, less a reserve; by default that of a device.

    Args:
        budget: As for `plan`.
        target: The target, if there is one.
        arrays: Arrays on the device, or shapes.
        reserve: What `checked_reserve` returned.
    """
    if budget is None:
        device = device_of(jax.tree.leaves(arrays))
        budget = target.budget if target else memory_budget_of(device)
    return less_reserve(checked_budget(budget), reserve)


def memory_budget_of(device: Any) -> int | None:
    """Return nine tenths of the memory of a device, of a CPU the machine's; `None` if unknown."""
    stats = device.memory_stats() or {}
    size = stats.get("bytes_limit")
    if size is None and device.platform == "cpu" and hasattr(os, "sysconf"):
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_BUDGET_SHARE * size) if size and size > 0 else None


def checked_compilations(compilations: int | None) -> int:
    """Return how many programs a search may compile.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is not from 1 to 10.
    """
    if compilations is None:
        return SETTINGS.compilations
    remedy = "Leave it out, or write compilations=6."
    return whole_number(compilations, "compilations", least=1, most=10, remedy=remedy)


def _share_of(text: str) -> Share | None:
    """A text that ends in a percent sign, as a share."""
    found = re.fullmatch(rf"\s*{_NUMBER}\s*%\s*", text.lower())
    if found is None:
        return None
    percent = float(found[1])
    if not 0 < percent <= 100:
        raise ValueError(
            "budget in percent must be above 0 and at most 100, of the peak of the baseline, got "
            f"{text!r}. Write '60%'."
        )
    return Share(percent / 100)


def _of_text(text: str, name: str) -> int:
    found = re.fullmatch(rf"\s*{_NUMBER}\s*([kmgt]?)(i?)(b?)\s*", text.lower())
    size = Fraction(0)
    if found and _is_size(*found.groups()):
        size = Fraction(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2]]
    if size < 1:
        raise ValueError(
            f"{name} as text must be a number and a unit, such as '1.5GiB', '800MB' or "
            f"'123456 B', got {text!r}."
            + (
                " A fraction is no text: write 0.5, or '60%' of the baseline."
                * name.endswith("budget")
            )
        )
    return int(size)


def _is_size(number: str, unit: str, binary: str, _: str) -> bool:
    """Whether a text is a size: without a unit it must be written as a whole number."""
    # "1.5" may mean gigabytes or a fraction, but not one and a half bytes.
    whole = Fraction(number).denominator == 1 and ("e" in number or "." not in number)
    return bool(unit) or (whole and not binary)
