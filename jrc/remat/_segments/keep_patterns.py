"""Runs of operators that stay held inside segments: the pass's `refined_ops_patterns`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jrc._errors import close_to, listed
from jrc._jaxpr import Program, call_name, primitive_name

_KEYS = ("main_ops", "pre_ops", "suf_ops", "num")


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Operators in a row, of which the middle ones are held.

    Attributes:
        pre: Operators that come directly before.
        main: Operators whose results are held.
        suf: Operators that come directly behind.
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
        """The equations among these, which are in program order, whose results are held."""
        names = [{primitive_name(program.eqns[p]), call_name(program.eqns[p])} for p in positions]
        found: list[int] = []
        start, left = 0, self.num
        while left != 0 and start + len(self.all) <= len(positions):
            here = names[start : start + len(self.all)]
            if all(op in known for op, known in zip(self.all, here, strict=True)):
                first = start + len(self.pre)
                found += positions[first : first + len(self.main)]
                left -= 1
                start += len(self.main)
            else:
                start += 1
        return found


def checked_patterns(patterns: object, who: str) -> tuple[Pattern, ...]:
    """The patterns that a user wrote as dicts, or an error that says what one looks like."""
    if isinstance(patterns, Mapping | str) or not isinstance(patterns, Iterable):
        raise TypeError(
            f"{who}: keep_patterns is a list of dicts such as {{'main_ops': ['dot_general'], "
            f"'num': 1}}; got {patterns!r}."
        )
    return tuple(_checked(pattern, who) for pattern in patterns)


def _checked(pattern: Any, who: str) -> Pattern:
    if not isinstance(pattern, Mapping):
        raise TypeError(
            f"{who}: each of keep_patterns is a dict; got {pattern!r}. Write "
            "{'main_ops': ['dot_general']}."
        )
    for key in pattern:
        if key not in _KEYS:
            raise ValueError(
                f"{who}: a pattern has the keys {listed(_KEYS)}; got {key!r}"
                f"{close_to(str(key), _KEYS)}."
            )
    for key in _KEYS[:3]:
        ops = pattern.get(key, ())
        if isinstance(ops, str) or not isinstance(ops, Sequence) or not all(
            isinstance(op, str) for op in ops
        ):  # fmt: skip
            raise TypeError(
                f"{who}: {key!r} is a list of operator names; got {ops!r}. Write "
                f"{{{key!r}: ['dot_general']}}."
            )
    if not pattern.get("main_ops"):
        raise ValueError(
            f"{who}: a pattern names at least one operator in 'main_ops'; got {pattern!r}. Write "
            "{'main_ops': ['dot_general']}."
        )
    num = pattern.get("num", -1)
    if isinstance(num, bool) or not isinstance(num, int) or num < -1:
        raise ValueError(
            f"{who}: 'num' counts matches, -1 is all of them; got {num!r}. Leave it out for all."
        )
    pre, main, suf = (tuple(pattern.get(key, ())) for key in ("pre_ops", "main_ops", "suf_ops"))
    return Pattern(pre, main, suf, num)
