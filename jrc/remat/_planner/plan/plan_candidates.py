"""What a plan shows of its choice: the cost of each candidate, and tables of it."""

import dataclasses
from collections.abc import Sequence

from jrc._text import Grid, exchange_text, memory_text, seconds_text
from jrc.remat._planner.plan.saved_by_plan import BASELINE, Kept

# Rows of a plan's tables: saved values, and candidates on each side of the chosen one.
_KEPT_ROWS = 12
_CANDIDATES_BESIDE = 2

PREDICTED = "~"
"""In front of what is predicted of a candidate that was not compiled."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a gradient program costs.

    Attributes:
        peak_bytes: Arguments, outputs and temporaries of the compiled program on one device, less
            what is aliased.
        flops: Floating-point operations of the whole program, loops times their length.
        flops_ratio: The same over those of the baseline.
        host_bytes: Bytes of saved values in the host's memory, no part of the peak; predicted, on
            all devices together, where XLA shards them by itself.
        seconds: Seconds of one run on one device, for comparing programs; `None` if unknown.
        seconds_from: Where they come from: stated by the compiler (TPUs), or modelled (a roofline
            over the kernels of a GPU's or CPU's program, or over equations before it is compiled),
            or measured.
    """

    peak_bytes: int
    flops: int
    flops_ratio: float
    host_bytes: int = 0
    seconds: float | None = None
    seconds_from: str = ""


@dataclasses.dataclass(frozen=True)
class PlanCandidate:
    """A candidate that was weighed for a plan.

    Attributes:
        predicted: Its cost as the model has it.
        verified: That of its compiled program; `None` if it was not compiled.
        saved_bytes: Predicted bytes that are saved after the forward pass.
        change: What it saves more and less than the leaner candidate before it.
        is_chosen: Whether it is the plan.
        name: What it is called: the baseline, one that recomputes nothing of what runs in chunks,
            or a manual plan. Of the others it is empty.
        sent_bytes: Bytes that one device sends to others in its compiled program; `None` if it was
            not compiled, or its arguments are not split over devices.
        rerun_sent_bytes: How many of them in recomputation: parameters that are gathered again.
    """

    predicted: Estimate
    verified: Estimate | None
    saved_bytes: int
    change: str
    is_chosen: bool
    name: str = ""
    sent_bytes: int | None = None
    rerun_sent_bytes: int | None = None

    @property
    def cost(self) -> Estimate:
        """The verified cost, or the predicted one."""
        return self.verified or self.predicted


def sent_text(candidate: PlanCandidate | None, bandwidth: float | None) -> list[str]:
    """Return a line on what one device sends to others, with its time at a bandwidth.

    Args:
        candidate: The chosen one.
        bandwidth: Bytes per second of a device's links, if known.
    """
    if candidate is None or not candidate.sent_bytes:
        return []
    return [exchange_text(candidate.sent_bytes, candidate.rerun_sent_bytes or 0, bandwidth)]


def kept_table(kept: Sequence[Kept]) -> Grid:
    """Return the table of what is saved, the largest first."""
    rows = [(each.name, f"{each.times:,}", memory_text(each.bytes)) for each in kept[:_KEPT_ROWS]]
    if rest := kept[_KEPT_ROWS:]:
        times, size = sum(each.times for each in rest), sum(each.bytes for each in rest)
        rows.append((f"{len(rest)} more", f"{times:,}", memory_text(size)))
    return Grid(("saved", "values", "bytes"), rows)


def candidates_table(candidates: Sequence[PlanCandidate]) -> Grid:
    """Return the table of the plan, its neighbours, both ends of the list, and manual plans.

    What is predicted of a candidate, and not known from its compiled program, begins with `~`.
    """
    names = [each.name for each in candidates]
    count = 1 + next((i for i, name in enumerate(names) if name), len(names) - 1)
    chosen = next((i for i, each in enumerate(candidates) if each.is_chosen), 0)
    beside = {*range(chosen - _CANDIDATES_BESIDE, chosen + _CANDIDATES_BESIDE + 1), 0, count - 1}
    shown = [*sorted(beside & set(range(count))), *range(count, len(candidates))]
    counts_sent = any(each.sent_bytes for each in candidates)
    offloads = any(each.cost.host_bytes for each in candidates)
    is_timed = any(each.cost.seconds is not None for each in candidates)
    rows = []
    for i in shown:
        each = candidates[i]
        about = "" if each.verified else PREDICTED
        place = f"{i + 1} of {count}" if i < count else ("" if each.name == BASELINE else "manual")
        rows.append(
            (
                f"{'> ' if each.is_chosen else ''}{place}",
                each.name or each.change,
                f"{about}{memory_text(each.cost.peak_bytes)}",
                f"{each.predicted.flops_ratio:.3f} x",
                *([_seconds_text(each)] if is_timed else []),
                *([_host_text(each)] if offloads else []),
                *([_sent_again(each)] if counts_sent else []),
            )
        )
    heads = ["candidate", "change from the leaner one", "peak", "FLOPs"]
    heads += ["time"] if is_timed else []
    heads += ["host"] if offloads else []
    heads += ["sent again"] if counts_sent else []
    return Grid(tuple(heads), rows)


def predicted_line(candidates: Sequence[PlanCandidate]) -> list[str]:
    """Return the line that says which figures of the candidates are predicted."""
    if all(each.verified for each in candidates):
        return []
    return [f"{PREDICTED} is in front of what is predicted; all else is of compiled programs"]


def _seconds_text(each: PlanCandidate) -> str:
    seconds, source = each.cost.seconds, each.cost.seconds_from
    if seconds is None:
        return ""
    about = "" if each.verified else PREDICTED
    measured = " (measured)" if source.startswith("measured") else ""
    return f"{about}{seconds_text(seconds)}{measured}"


def _host_text(each: PlanCandidate) -> str:
    return memory_text(each.cost.host_bytes) if each.cost.host_bytes else ""


def _sent_again(each: PlanCandidate) -> str:
    return "" if each.rerun_sent_bytes is None else memory_text(each.rerun_sent_bytes)
