"""Steps of all methods in turns: seconds, bytes, and their summary."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._lib.timing import quartiles, ratios
from benchmarks.network._group import Group

Groups = Mapping[str, Group]


def alternate(groups: Groups, blocks: int, steps: int) -> dict[str, Any]:
    """Measure seconds and bytes of all methods, block by block in turns.

    Args:
        groups: The processes of each method, warmed up.
        blocks: Blocks of each method.
        steps: Steps in a block of DGC; a block of slower steps takes about as long.

    Returns:
        For each method the seconds of every block's steps, each of the slowest process, and the
        bytes that one process sends in a step; None where no interface counts them.
    """
    first = {method: slowest(group, method, 1)[0] for method, group in groups.items()}
    fitting = {method: round(steps * first["dgc"] / first[method]) for method in groups}
    counts = {method: min(max(count, 1), steps) for method, count in fitting.items()}
    found: dict[str, Any] = {method: {"blocks": [], "sent": []} for method in groups}
    for _ in range(blocks):
        for method, group in groups.items():
            before = group.ask("counters")
            found[method]["blocks"].append(slowest(group, method, counts[method]))
            sent = sent_a_step(before, group.ask("counters"), counts[method])
            found[method]["sent"].append(sent)
    return found


def slowest(group: Group, method: str, count: int) -> list[float]:
    """Take steps and return the seconds of each, of its slowest process."""
    return [max(step) for step in zip(*group.ask("steps", method=method, count=count), strict=True)]


def sent_a_step(before: Sequence[Any], after: Sequence[Any], steps: int) -> float | None:
    """Return the mean bytes that a process sent in a step, from the interfaces' counters."""
    if None in before:
        return None
    total = sum(now["sent"] - then["sent"] for then, now in zip(before, after, strict=True))
    return total / len(before) / steps


def summary(found: dict[str, Any], predicted: dict[str, float]) -> dict[str, Any]:
    """Return medians, quartiles and ratios to DGC; dense's ratio stands in the row itself."""
    row: dict[str, Any] = {}
    for method, measured in found.items():
        seconds = [step for block in measured["blocks"] for step in block]
        low, middle, high = quartiles(seconds)
        sent = measured["sent"]
        row[method] = {
            "seconds": middle,
            "least": min(seconds),
            "quartiles": [low, high],
            "steps": len(seconds),
            "bytes_sent": None if None in sent else statistics.median(sent),
            "bytes_predicted": predicted[method],
        }
    middles = {
        method: [statistics.median(block) for block in measured["blocks"]]
        for method, measured in found.items()
    }
    for method in (method for method in found if method != "dgc"):
        at = row if method == "dense" else row[method]
        at["ratio"] = row[method]["seconds"] / row["dgc"]["seconds"]
        at["ratios"] = sorted(ratios(middles[method], middles["dgc"]))
    return row
