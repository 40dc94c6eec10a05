"""What helps where a program needs too much memory, read from its report."""

from jrc._text import memory_text
from jrc.remat._report.remedy import Remedy, donation_text
from jrc.remat._report.report_data import ReportData

LEAST_SAVING = 0.02
"""What was compiled is a remedy if it makes the peak smaller by at least this share."""
# What was not compiled is named where it is about at least this share of the peak.
_LEAST_SHARE = 0.1
_LARGE_SHARE = 0.25
_ADD_NO_WORK = ("donate", "cast")
_OF_TEMPORARIES = ("chunks", "cast", "plan", "loss")


def remedies_of(report: ReportData) -> tuple[Remedy, ...]:
    """Return what makes the peak smaller.

    What was compiled comes first, that of the least seconds at its head; then what was not, the
    most bytes first. The bytes of these are those that a remedy is about. What XLA does not keep in
    memory at once, such as values that it fuses, may be among them, but no more than there are
    temporaries. What was compiled and helps little is left out.
    """
    helps = [each for each in report.tried if each.bytes > LEAST_SAVING * report.memory.peak]
    tried = {each.kind for each in report.tried}
    tried |= {"chunks"} if "plan" in tried else set()  # plans run in chunks what they can
    return (*helps, *(each for each in _expected(report) if each.kind not in tried))


def _expected(report: ReportData) -> list[Remedy]:
    memory, peak = report.memory, report.memory.peak
    found: list[Remedy] = []

    def add(kind: str, size: int, text: str, least: float = _LEAST_SHARE) -> None:
        size = min(size, memory.temporaries if kind in _OF_TEMPORARIES else peak)
        if size and size >= least * peak:
            ratio = 1.0 if kind in _ADD_NO_WORK else None
            found.append(Remedy(text, kind, peak, size, None, ratio))

    own = memory.arguments + memory.outputs - memory.aliased
    add(
        "shard",
        own,
        "arguments and results are there whatever is recomputed: shard them over devices, or use "
        "a lower precision or a smaller optimizer state",
        0.5,
    )
    add("donate", report.donatable, donation_text(report.donatable_argnums), 0.0)
    largest = max(report.saved, key=lambda each: each.bytes // max(each.times, 1), default=None)
    if largest is not None:
        what = f"{largest.dtype}[{','.join(map(str, largest.shape))}] at {largest.place}"
        size = largest.bytes // max(largest.times, 1)
        text = f"one array, {what}, can be made in chunks: jrc.plan does it"
        add("chunks", size, text, _LARGE_SHARE)
    if report.is_gradient:
        raised = [
            each
            for each in report.saved
            if each.primitive == "convert_element_type" and each.dtype == "float32"
        ]
        if raised:
            place = max(raised, key=lambda each: each.bytes).place
            size = sum(each.bytes for each in raised)
            text = f"values are cast to float32 and saved, most at {place}: save what is cast"
            add("cast", size, text)
        add(
            "plan",
            report.saved_bytes,
            "values are saved for the backward pass: jrc.plan(fn, *args, budget='60%') recomputes "
            "some",
        )
        if report.saved_bytes < _LEAST_SHARE * peak:
            add(
                "plan",
                memory.temporaries,
                "few of the temporaries are values that are saved, as where a whole loss or a "
                "library recomputes: jrc.plan(fn, *args, budget='60%') may cut it otherwise, and "
                "try_remedies=True compiles that",
                _LARGE_SHARE,
            )
    elif memory.aliased or report.donatable:  # a step: its state has the types of its results
        add(
            "loss",
            memory.temporaries,
            f"{memory_text(memory.temporaries)} are temporaries of a train step, and a plan of its "
            "loss leaves out some: jrc.plan(loss, ..., reserve=opt_state), and call "
            "plan.apply(loss) in the step; or jrc.make_train_step(..., memory_budget=...)",
            _LARGE_SHARE,
        )
    found.sort(key=lambda each: -each.bytes)
    if report.constants >= _LEAST_SHARE * peak and report.constants:
        text = (
            f"the function closes over {memory_text(report.constants)} of arrays, which are in no "
            "figure of XLA's: pass them as arguments"
        )
        found.append(Remedy(text, "constants", peak, 0))
    return found
