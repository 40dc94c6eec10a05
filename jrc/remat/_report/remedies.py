"""What helps where a program needs too much memory, read from its report."""

from jrc._text import memory_text
from jrc.remat._report.report_data import ReportData

# A remedy is named where it is about at least this share of the peak.
_LEAST_SHARE = 0.1
_LARGE_SHARE = 0.25


def remedies_of(report: ReportData) -> tuple[str, ...]:
    """Return what makes the peak smaller, what is about the most bytes first.

    Bytes are those that a remedy is about. What XLA does not keep in memory at once, such as values
    that it fuses, may be among them.
    """
    memory, peak = report.memory, report.memory.peak
    found: list[tuple[int, str]] = []

    def add(size: int, text: str, least: float = _LEAST_SHARE) -> None:
        if peak and size >= least * peak:
            found.append((size, f"{text} ({memory_text(size)} of a peak of {memory_text(peak)})"))

    own = memory.arguments + memory.outputs - memory.aliased
    add(
        own,
        "arguments and results are there whatever is recomputed: shard them over devices, or use "
        "a lower precision or a smaller optimizer state",
        0.5,
    )
    add(
        report.donatable,
        "results could lie in the memory of arguments of the same type: jax.jit(fn, "
        "donate_argnums=...)",
    )
    largest = max(report.saved, key=lambda each: each.bytes // max(each.times, 1), default=None)
    if largest is not None:
        what = f"{largest.dtype}[{','.join(map(str, largest.shape))}] at {largest.place}"
        size = largest.bytes // max(largest.times, 1)
        add(size, f"one array, {what}, can be made in chunks: jrc.plan does it", _LARGE_SHARE)
    if report.is_gradient:
        raised = [
            each
            for each in report.saved
            if each.primitive == "convert_element_type" and each.dtype == "float32"
        ]
        if raised:
            place = max(raised, key=lambda each: each.bytes).place
            size = sum(each.bytes for each in raised)
            add(size, f"values are cast to float32 and saved, most at {place}: save what is cast")
        add(
            report.saved_bytes,
            "values are saved for the backward pass: jrc.plan(fn, *args, budget='60%') recomputes "
            "some",
        )
    elif memory.aliased or report.donatable:  # a step: its state has the types of its results
        add(
            memory.temporaries,
            "temporaries of a train step: plan its loss, jrc.plan(loss, ..., reserve=opt_state), "
            "and call plan.apply(loss) in the step",
            _LARGE_SHARE,
        )
    found.sort(key=lambda each: -each[0])
    texts = [text for _, text in found]
    if report.constants >= _LEAST_SHARE * peak and report.constants:
        texts.append(
            f"the function closes over {memory_text(report.constants)} of arrays, which are in no "
            "figure of XLA's: pass them as arguments"
        )
    return tuple(texts)
