"""Reports as text for a terminal of 80 columns: one, and two side by side."""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from jrc._targets import link_bandwidth_of
from jrc._text import (
    TEXT_WIDTH,
    Grid,
    exchange_text,
    flops_text,
    memory_text,
    seconds_text,
    text_of,
)
from jrc.remat._compiled.collectives import Collective
from jrc.remat._gradient.opaque import opaque_lines
from jrc.remat._gradient.saved_values import SavedValue
from jrc.remat._report.remedies import remedies_of
from jrc.remat._report.report_data import ReportData, check_names, check_reports
from jrc.remat._time.seconds import Seconds

# The most rows of saved values, and the smallest share of all bytes that has a row of its own.
_MAX_ROWS = 14
_MIN_SHARE = 0.005
_MAX_OPERATORS = 6
_MAX_LINES = 8
_WARNING, _MARKS, _REMEDY = "warning: ", "saved marks: ", "what helps: "
# Lines that are broken at the width of the tables.
_WRAPPED = (_WARNING, _MARKS, _REMEDY)
_MAX_COLLECTIVES = 6
_SHORT_DTYPES = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


def report_text(report: ReportData) -> str:
    """Return a report as text."""
    return "\n".join(
        textwrap.fill(part, TEXT_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        if isinstance(part, str) and part.startswith(_WRAPPED)
        else str(part)
        for part in report_parts(report)
    )


def report_parts(report: ReportData) -> list[str | Grid]:
    """Return the lines and tables of a report."""
    memory = report.memory
    parts = [("arguments", memory.arguments), ("outputs", memory.outputs)]
    parts.append(("temporaries", memory.temporaries))
    total = " + ".join(f"{name} {memory_text(n)}" for name, n in parts)
    aliased = f" - aliased {memory_text(memory.aliased)}" if memory.aliased else ""
    what = f"{'gradient of ' if report.is_gradient else ''}`{report.name}` on {report.device}"
    return [
        what,
        f"peak {memory_text(memory.peak)} = {total}{aliased}{_on_host(memory.host)}",
        *_saved_line(report),
        *_time_line(report.time),
        *(_gradient_tables(report) if report.is_gradient else _largest_table(report)),
        *_collective_table(report),
        *(f"{_WARNING}{warning}" for warning in report.warnings),
        *(f"{_REMEDY}{remedy}" for remedy in remedies_of(report)),
    ]


def _gradient_tables(report: ReportData) -> list[str | Grid]:
    return [
        *_saved_table(report),
        *_mark_lines(report),
        *opaque_lines(report.opaque),
        *_rerun_table(report),
    ]


def _largest_table(report: ReportData) -> list[str | Grid]:
    """The largest values of a function that is reported as it is."""
    rows = [
        (
            f"{f'{each.times} x ' if each.times > 1 else ''}{each.primitive} {_type(each)}",
            each.place,
            memory_text(each.bytes // max(each.times, 1)),
        )
        for each in report.saved[:_MAX_ROWS]
    ]
    return [Grid(("largest values of the program", "made at", "each"), rows)] if rows else []


def _saved_line(report: ReportData) -> list[str]:
    if not report.is_gradient:
        return []
    return [
        f"saved for the backward pass {memory_text(report.saved_bytes)}{_offloaded(report)}, "
        f"run again {flops_text(report.rerun_flops)} of {flops_text(report.flops)}"
        f" ({_share(report.rerun_flops, report.flops)})"
    ]


def _time_line(time: Seconds | None) -> list[str]:
    return [f"time {seconds_text(time.value)} ({time.source})"] if time else []


def compare_text(report: ReportData, other: ReportData, names: Sequence[str]) -> str:
    """Return two reports side by side as text.

    Raises:
        TypeError: If `other` is no report, or `names` no list of strings.
        ValueError: If there are not two names.
    """
    check_reports([other])
    if len(check_names(names)) != 2:
        raise ValueError(
            f"names must be two, one for each report, got {names!r}. Write "
            "names=('before', 'after')."
        )
    both = (report, other)
    rows = [
        _pair("peak", [r.memory.peak for r in both], memory_text),
        _pair("  arguments", [r.memory.arguments for r in both], memory_text),
        _pair("  outputs", [r.memory.outputs for r in both], memory_text),
        _pair("  temporaries", [r.memory.temporaries for r in both], memory_text),
        _pair("FLOPs", [r.flops for r in both], flops_text),
    ]
    if any(r.memory.aliased for r in both):
        rows.insert(4, _pair("  aliased", [r.memory.aliased for r in both], memory_text))
    if any(r.is_gradient for r in both):
        rows.insert(-1, _pair("saved", [r.saved_bytes for r in both], memory_text))
        rows.insert(-1, _pair("run again", [r.rerun_flops for r in both], flops_text))
    if all(r.time for r in both):
        rows.append(_pair("time", [r.time.value for r in both if r.time], seconds_text))
    heads = ("", "", *map(str, names), "change", "ratio")
    parts = [Grid(heads, rows)]
    changed = _changed_lines(report.by_line, other.by_line)
    if changed:
        parts.append(Grid(("saved at", "", *map(str, names), "change", "ratio"), changed))
    return text_of([*parts, *_versions(report, other, names)])


def _versions(report: ReportData, other: ReportData, names: Sequence[str]) -> list[str]:
    """A line for each report of two, with the versions that the other one has not."""
    pairs = (report, other, names[0]), (other, report, names[1])
    only = [(name, [v for v in a.versions if v not in b.versions]) for a, b, name in pairs]
    return [f"{name} was made with {', '.join(some)}" for name, some in only if some]


def _changed_lines(one: Mapping[str, int], other: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return a row for each source line that saves another number of bytes, most changed first."""
    pairs = {line: (one.get(line, 0), other.get(line, 0)) for line in {**one, **other}}
    pairs = {line: pair for line, pair in pairs.items() if pair[0] != pair[1]}
    order = sorted(pairs, key=lambda line: (-abs(pairs[line][0] - pairs[line][1]), line))
    rows = [_pair(line, pairs[line], memory_text) for line in order[:_MAX_LINES]]
    if rest := order[_MAX_LINES:]:
        sums = [sum(pairs[line][k] for line in rest) for k in (0, 1)]
        rows.append(_pair(f"{len(rest)} more lines", sums, memory_text))
    return rows


def _pair(name: str, values: Sequence[float], text: Callable[[float], str]) -> tuple[str, ...]:
    """Return a row: two values, their difference and their ratio."""
    before, after = values
    change = after - before
    sign = "-" if change < 0 else "+"
    ratio = f"{after / before:.3f}" if before else ""
    return (name, "", text(before), text(after), f"{sign}{text(abs(change))}" if change else "",
            ratio)  # fmt: skip


def _on_host(size: int) -> str:
    return f"; beside it {memory_text(size)} of the host's memory" if size else ""


def _offloaded(report: ReportData) -> str:
    """Return the saved bytes in other memories than the device's."""
    kinds = sorted({value.memory for value in report.saved} - {"device"})
    sums = {k: sum(v.bytes for v in report.saved if v.memory == k) for k in kinds}
    return "".join(f" and {memory_text(n)} in {kind}" for kind, n in sums.items())


def _saved_table(report: ReportData) -> list[str | Grid]:
    if not report.saved:
        return ["nothing is saved besides the arguments"]
    groups: dict[tuple[object, ...], list[SavedValue]] = {}
    for value in report.saved:
        key = (value.primitive, value.shape, value.dtype, value.place, value.times, value.memory)
        groups.setdefault((*key, _stem(value.mark)), []).append(value)
    order = sorted(groups.values(), key=lambda group: -_bytes(group))
    whole = _bytes(report.saved)
    large = [group for group in order[:_MAX_ROWS] if _bytes(group) >= _MIN_SHARE * whole]
    rows = [_saved_row(group, whole) for group in large]
    if rest := [value for group in order[len(large) :] for value in group]:
        count = f"{len(rest)} smaller values"
        rows.append((count, "", "", "", memory_text(_bytes(rest)), _share(_bytes(rest), whole)))
    return [Grid(("saved value", "made at", "mark", "each", "bytes", "share"), rows)]


def _saved_row(group: Sequence[SavedValue], whole: int) -> tuple[str, ...]:
    """Return a row for equal values of several layers; `whole` is the bytes of all values."""
    first = group[0]
    steps = f"{first.times} steps x " if first.times > 1 else ""
    count = f"{len(group)} x " if len(group) > 1 else ""
    where = "" if first.memory == "device" else f" in {first.memory}"
    each = memory_text(first.bytes / first.times) if count or steps else ""
    return (
        f"{count}{steps}{first.primitive} {_type(first)}{where}",
        first.place,
        _joined(value.mark for value in group if value.mark),
        each,
        memory_text(_bytes(group)),
        _share(_bytes(group), whole),
    )


def _mark_lines(report: ReportData) -> list[str]:
    groups: dict[str, list[str]] = {}
    for mark in (mark for mark, n in report.by_mark.items() if n):
        groups.setdefault(_stem(mark) or mark, []).append(mark)
    totals = {_joined(marks): sum(report.by_mark[m] for m in marks) for marks in groups.values()}
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{names} {memory_text(n)}" for names, n in ordered[:_MAX_LINES]]
    if rest := ordered[_MAX_LINES:]:
        shown.append(f"{len(rest)} more {memory_text(sum(n for _, n in rest))}")
    return [f"{_MARKS}{', '.join(shown)}"] if shown else []


def _rerun_table(report: ReportData) -> list[str | Grid]:
    rows = [
        (each.primitive, f"{each.count:,} x", flops_text(each.flops), _share(each.flops,
         report.flops))
        for each in report.rerun[:_MAX_OPERATORS]
    ]  # fmt: skip
    if rest := report.rerun[_MAX_OPERATORS:]:
        work = sum(each.flops for each in rest)
        count = sum(each.count for each in rest)
        head = f"{len(rest)} more operators"
        rows.append((head, f"{count:,} x", flops_text(work), _share(work, report.flops)))
    heads = ("run again", "", "", "of all FLOPs")
    return [Grid(heads, rows)] if rows else ["nothing is run again"]


def _collective_table(report: ReportData) -> list[str | Grid]:
    if not report.collectives:
        return []
    rows = [_collective_row(each) for each in report.collectives[:_MAX_COLLECTIVES]]
    if rest := report.collectives[len(rows) :]:
        rows.append(_collective_sums(f"{len(rest)} more", "", rest))
    if len(report.collectives) > 1:
        rows.append(_collective_sums("all", "", report.collectives))
    heads = ("collective", "over", "runs", "backward", "re-run", "bytes sent", "of these re-run")
    bandwidth = link_bandwidth_of(report.device)
    line = exchange_text(report.sent_bytes, report.rerun_sent_bytes, bandwidth)
    return [Grid(heads, rows), *([line] if bandwidth else [])]


def _collective_row(each: Collective) -> tuple[str, ...]:
    first, *others = each.arrays or ("",)
    more = f" and {len(others)} more" if others else ""
    over = ", ".join(each.axes) or (f"{each.devices} devices" if each.devices else "")
    return _collective_sums(f"{each.kind} {first}{more}", over, [each])


def _collective_sums(name: str, over: str, group: Sequence[Collective]) -> tuple[str, ...]:
    counts = [sum(getattr(c, key) for c in group) for key in ("count", "backward", "rerun")]
    sent = [sum(getattr(c, key) for c in group) for key in ("sent", "rerun_sent")]
    return (name, over, *(f"{n:,}" for n in counts), *map(memory_text, sent))


def _bytes(group: Iterable[SavedValue]) -> int:
    return sum(value.bytes for value in group)


def _type(value: SavedValue) -> str:
    found = re.match(r"([a-z]+)(\d+)$", value.dtype)
    short = (
        f"{_SHORT_DTYPES[found[1]]}{found[2]}"
        if found and found[1] in _SHORT_DTYPES
        else value.dtype
    )
    return f"{short}[{','.join(map(str, value.shape))}]"


def _stem(mark: str | None) -> str | None:
    """Return a mark with `*` for its numbers: marks of equal blocks share a row."""
    return None if mark is None else re.sub(r"\d+", "*", mark)


def _joined(names: Iterable[str]) -> str:
    """Return `block_0 … block_11` for many names, in the order of their numbers."""
    known = sorted(set(names), key=lambda n: [int(k) for k in re.findall(r"\d+", n)])
    return known[0] + f" … {known[-1]}" * (len(known) > 1) if known else ""


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
