"""A user's request for a cut, checked before a program is traced."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jrc._jaxpr import call_name
from jrc._validate import check_flag, one_of, whole_number
from jrc.remat._policy.resolution import Policy
from jrc.remat._policy.rules import Rule, check_keep
from jrc.remat._region.region import should_inline
from jrc.remat._segments.cut_rules import RULES
from jrc.remat._segments.keep_patterns import Pattern, checked_patterns


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks for, besides the function.

    Attributes:
        checkpoints: Names of the boundaries.
        rule: How boundaries become segments.
        policy: The rules for what is saved inside segments.
        patterns: Runs of operators whose results are saved there.
        no_recompute_segments: Numbers of the segments that are not recomputed.
    """

    checkpoints: tuple[str, ...]
    rule: str
    policy: Policy
    patterns: tuple[Pattern, ...]
    no_recompute_segments: tuple[Any, ...]

    def opens(self, eqn: Any) -> bool:
        """Return whether a `jit` call is written inline; one that a pattern names is not."""
        if any(call_name(eqn) in pattern.all for pattern in self.patterns):
            return False
        return bool(self.patterns) or should_inline(self.policy)(eqn)


def checked_request(
    fn: Any,
    checkpoints: Sequence[str],
    rule: str,
    keep: Rule | None,
    keep_patterns: Sequence[Mapping[str, Any]],
    no_recompute_segments: Sequence[int],
    recompute_collectives: bool,
) -> Request:
    """Return the request, or raise if it is wrong for any program."""
    _check_names(fn, checkpoints, rule)
    check_keep(keep)
    check_flag(recompute_collectives, "recompute_collectives")
    if isinstance(no_recompute_segments, str) or not isinstance(no_recompute_segments, Iterable):
        raise TypeError(
            "no_recompute_segments must be a list of numbers, got "
            f"{no_recompute_segments!r}. Write no_recompute_segments=[0]."
        )
    return Request(
        tuple(checkpoints),
        rule,
        Policy(keep, not recompute_collectives),
        checked_patterns(keep_patterns),
        tuple(no_recompute_segments),
    )


def _check_names(fn: Any, checkpoints: Sequence[str], rule: str) -> None:
    if not callable(fn):
        raise TypeError(
            f"fn must be the function to cut, got {fn!r}. Pass the loss function itself, "
            "and then the names of its marks."
        )
    one_of(rule, "rule", RULES)
    if isinstance(checkpoints, str) or not isinstance(checkpoints, Collection):
        raise TypeError(
            f"checkpoints must be a list of mark names, got {type(checkpoints).__name__} "
            f"{checkpoints!r}. Write checkpoints=['block_0', 'block_1']."
        )
    for name in checkpoints:
        if not isinstance(name, str):
            raise TypeError(
                f"checkpoints must contain names of marks, got {type(name).__name__}. "
                "Mark the value with jrc.mark(x, 'name') and pass 'name'."
            )


def checked_numbers(indices: Sequence[Any], count: int) -> frozenset[int]:
    """Return the numbers of segments that are not recomputed, or raise if one is no segment.

    Args:
        indices: What the user passed.
        count: The number of segments.
    """
    remedy = "See the segments with jrc.find_segments."
    if indices and not count:
        raise ValueError(
            "no_recompute_segments must be empty where there is no segment, got "
            f"{list(indices)}. {remedy}"
        )
    numbers = [
        whole_number(i, f"no_recompute_segments[{k}]", least=0, most=count - 1, remedy=remedy)
        for k, i in enumerate(indices)
    ]
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"no_recompute_segments must name each segment once, got {numbers}. "
            "Remove the repeated number."
        )
    return frozenset(numbers)
