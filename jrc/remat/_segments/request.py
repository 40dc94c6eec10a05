"""What a user asks of a cut, checked before any program is looked at."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jrc._errors import listed
from jrc._jaxpr import call_name
from jrc._validate import check_flag
from jrc.remat._policy.resolution import Policy
from jrc.remat._policy.rules import Rule, check_keep
from jrc.remat._region.interpreter import should_inline
from jrc.remat._segments.cut_rules import RULES
from jrc.remat._segments.keep_patterns import Pattern, checked_patterns


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks for, besides the function.

    Attributes:
        checkpoints: Names of the boundaries.
        rule: How boundaries become segments.
        say: What is kept inside of segments, by name or by operator.
        patterns: What is kept there, by runs of operators.
        no_recompute_segments: Numbers of segments that are left alone.
    """

    checkpoints: tuple[str, ...]
    rule: str
    policy: Policy
    patterns: tuple[Pattern, ...]
    no_recompute_segments: tuple[Any, ...]

    def opens(self, eqn: Any) -> bool:
        """Whether a `jit` call is written inline; one that is named itself stays closed."""
        if any(call_name(eqn) in pattern.all for pattern in self.patterns):
            return False
        return bool(self.patterns) or should_inline(self.policy)(eqn)


def checked_request(
    who: str,
    fn: Any,
    checkpoints: Sequence[str],
    rule: str,
    keep: Rule | None,
    keep_patterns: Sequence[Mapping[str, Any]],
    no_recompute_segments: Sequence[int],
    recompute_collectives: bool,
) -> Request:
    """What is asked for, or an error about what is wrong whatever the program."""
    _check_names(who, fn, checkpoints, rule)
    check_keep(keep, who)
    check_flag(recompute_collectives, "recompute_collectives", who)
    if isinstance(no_recompute_segments, str) or not isinstance(no_recompute_segments, Iterable):
        raise TypeError(
            f"{who}: no_recompute_segments is a list of numbers; got {no_recompute_segments!r}. "
            "Write no_recompute_segments=[0]."
        )
    return Request(
        tuple(checkpoints),
        rule,
        Policy(keep, not recompute_collectives),
        checked_patterns(keep_patterns, who),
        tuple(no_recompute_segments),
    )


def _check_names(who: str, fn: Any, checkpoints: Sequence[str], rule: str) -> None:
    if not callable(fn):
        raise TypeError(
            f"{who}: the first argument is the function to cut; got {fn!r}. Pass the loss "
            "function itself, and then the names of its marks."
        )
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"{who}: rule is one of {listed(RULES)}; got {rule!r}.")
    if isinstance(checkpoints, str) or not isinstance(checkpoints, Collection):
        raise TypeError(
            f"{who}: checkpoints is a list of mark names; got {type(checkpoints).__name__} "
            f"{checkpoints!r}. Write checkpoints=['block_0', 'block_1']."
        )
    for name in checkpoints:
        if not isinstance(name, str):
            raise TypeError(
                f"{who}: a boundary is the name of a mark, a string; got {type(name).__name__}. "
                "Mark the value with jrc.mark(x, 'name') and pass 'name'."
            )


def checked_numbers(indices: Sequence[int], count: int, who: str) -> frozenset[int]:
    """The numbers of segments that are left alone, of so many segments."""
    for i in indices:
        if isinstance(i, bool) or not hasattr(i, "__index__"):
            raise TypeError(
                f"{who}: no_recompute_segments holds segment numbers; got {i!r}. See them with "
                "jrc.find_segments."
            )
        if not 0 <= i < count:
            last = f" from 0 to {count - 1}" if count else ""
            raise ValueError(
                f"{who}: no_recompute_segments counts the {count} segments{last}; got {i}. See "
                "them with jrc.find_segments."
            )
        if list(indices).count(i) > 1:
            raise ValueError(
                f"{who}: no_recompute_segments names segment {i} more than once; got "
                f"{list(indices)}. Name it once."
            )
    return frozenset(int(i) for i in indices)
