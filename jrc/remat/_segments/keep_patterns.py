"""Runs of operators whose results are saved inside segments: Paddle's `refined_ops_patterns`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jrc._errors import close_to, listed
from jrc._jaxpr import Program, call_name, primitive_name
from jrc._validate import whole_number

_KEYS = ("main_ops", "pre_ops", "suf_ops", "num")


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A run of operators, of which the results of the middle ones are saved.

    Attributes:
        pre: The operators directly before.
        main: The operators whose results are saved.
        suf: The operators directly behind.
        num: How many matches count in each segment, -1 for all.
    """

    pre: tuple[str, ...]
    main: tuple[str, ...]
    suf: tuple[str, ...]
    num: int

    @property
    def all(self) -> tuple[str, ...]:
        """The whole run."""
        return self.pre + self.main + self.suf

    def matches(self, program: Program, positions: Sequence[int]) -> list[int]:
        """Return the equations whose results are saved.

        Args:
            program: The program.
            positions: The equations to look at, in program order.
        """
        names = [operator_names(program, p) for p in positions]
        found: list[int] = []
        start, left = 0, self.num
        while left != 0 and start + len(self.all) <= len(positions):
            run = names[start : start + len(self.all)]
            if all(op in known for op, known in zip(self.all, run, strict=True)):
                first = start + len(self.pre)
                found += positions[first : first + len(self.main)]
                left -= 1
                start += len(self.main)
            else:
                start += 1
        return found


def operator_names(program: Program, p: int) -> set[str]:
    """Return the names under which a pattern finds an equation."""
    eqn = program.eqns[p]
    return {name for name in (primitive_name(eqn), call_name(eqn)) if name}


def checked_patterns(patterns: object) -> tuple[Pattern, ...]:
    """Return the patterns that a user wrote as dicts, or raise."""
    if isinstance(patterns, Mapping | str) or not isinstance(patterns, Iterable):
        raise TypeError(
            f"keep_patterns must be a list of dicts, got {patterns!r}. Write "
            "[{'main_ops': ['dot_general'], 'num': 1}]."
        )
    return tuple(_checked(pattern, f"keep_patterns[{i}]") for i, pattern in enumerate(patterns))


def _checked(pattern: Any, name: str) -> Pattern:
    if not isinstance(pattern, Mapping):
        raise TypeError(
            f"{name} must be a dict, got {pattern!r}. Write {{'main_ops': ['dot_general']}}."
        )
    for key in pattern:
        if key not in _KEYS:
            raise ValueError(
                f"{name} must have keys from {listed(_KEYS)}, got {key!r}"
                f"{close_to(str(key), _KEYS)}."
            )
    for key in _KEYS[:3]:
        ops = pattern.get(key, ())
        if isinstance(ops, str) or not isinstance(ops, Sequence) or not all(
            isinstance(op, str) for op in ops
        ):  # fmt: skip
            raise TypeError(
                f"{name}[{key!r}] must be a list of operator names, got {ops!r}. Write "
                f"{{{key!r}: ['dot_general']}}."
            )
    if not pattern.get("main_ops"):
        raise ValueError(
            f"{name}['main_ops'] must name at least one operator, got {pattern!r}. Write "
            "{'main_ops': ['dot_general']}."
        )
    num = whole_number(
        pattern.get("num", -1), f"{name}['num']", least=-1,
        remedy="Leave it out, or write -1, for all matches.",
    )  # fmt: skip
    pre, main, suf = (tuple(pattern.get(key, ())) for key in ("pre_ops", "main_ops", "suf_ops"))
    return Pattern(pre, main, suf, num)
