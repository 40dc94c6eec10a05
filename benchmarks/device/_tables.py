"""The tables of the parts of `benchmarks.device.all`."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks._lib.table import Row, Table
from benchmarks._lib.timing import quartiles
from benchmarks._private import memory_text, seconds_text
from benchmarks.device import _measured, _offload, _sizes
from benchmarks.device._seconds import BASELINE, BY_HAND
from benchmarks.memory.seconds import rank_correlation

Rows = Mapping[str, Any]


def _table(title: str, heads: Row, rows: Rows, cells: Callable[[Any], Row], *needs: str) -> Table:
    """Return a table of the rows that have what is needed; the note has the errors of others."""
    whole = {name: row for name, row in rows.items() if all(key in row for key in needs)}
    errors = [f"{name}: {row['error']}" for name, row in rows.items() if "error" in row]
    return Table(
        title, heads, [(name, *cells(row)) for name, row in whole.items()], "\n\n".join(errors)
    )


def _memory(size: float | None) -> str:
    return "-" if size is None else memory_text(size)


def _error(value: float | None, of: float | None) -> str:
    return f"{100 * (value / of - 1):+.1f} %" if value and of else "-"


def peaks(rows: Rows) -> list[Table]:
    """Return the peak of each program from both compilers and the allocator, and the errors."""

    def cells(row: Any) -> Row:
        measured, there = row["measured"], row.get("target_peak")
        return (
            _memory(row["compiled"]),
            _memory(there),
            row["why"] if measured is None else _memory(measured),
            _error(row["compiled"], measured),
            _error(there, measured),
        )

    heads = ("", "this compiler", "target", "allocator", "error", "error of the target")
    title = "Peak of gradient programs, stated and measured"
    return [_table(title, heads, rows, cells, "compiled", "measured"), *_peak_errors(rows)]


def _peak_errors(rows: Rows) -> list[Table]:
    found = []
    for key, name in (("compiled", "this compiler"), ("target_peak", "target")):
        sizes = [
            abs(row[key] / row["measured"] - 1)
            for row in rows.values()
            if row.get("measured") and row.get(key)
        ]
        if sizes:
            middle, most = statistics.median(sizes), max(sizes)
            found.append((name, str(len(sizes)), f"{100 * middle:.1f} %", f"{100 * most:.1f} %"))
    heads = ("", "programs", "median error", "largest")
    return [Table("Errors of stated peaks", heads, found)] if found else []


def seconds(rows: Rows) -> list[Table]:
    """Return stated against measured seconds of each program and all."""

    def cells(row: Any) -> Row:
        programs, rank = row["programs"], ranked(row["programs"])
        hand, errors, baseline = programs.get(BY_HAND), stated_errors(programs), programs[BASELINE]
        fastest = min(plan_seconds(programs), default=None)
        return (
            str(len(programs)),
            f"{memory_text(baseline['peak'])}, {seconds_text(baseline['seconds'])}",
            f"{memory_text(hand['peak'])}, {hand['seconds'] / baseline['seconds']:.3f} x"
            if hand
            else "-",
            f"{fastest / baseline['seconds']:.3f} x" if hand and fastest else "-",
            "-" if rank is None else f"{rank:.2f}",
            f"{100 * statistics.median(errors):.0f} %" if errors else "-",
            more_than_for_the_target(programs),
        )

    heads = (
        "", "programs", "baseline", "every block recomputed", "fastest plan in as many bytes",
        "rank", "median error", "plans need more than for the target",
    )  # fmt: skip
    title = "Seconds of plans, stated and measured; rank: Spearman's"
    found = [row["programs"] for row in rows.values() if "programs" in row]
    ranks = [rank for rank in map(ranked, found) if rank is not None]
    errors = [error for each in found for error in stated_errors(each)]
    tables = [_table(title, heads, rows, cells, "programs")]
    if ranks and errors:
        cells_ = (f"{statistics.median(ranks):.2f}", f"{100 * statistics.median(errors):.0f} %")
        heads = ("", "median rank", "median error")
        tables.append(Table("All programs", heads, [(f"{len(ranks)} programs", *cells_)]))
    return tables


def more_than_for_the_target(programs: Rows) -> str:
    """Return the least and most bytes that plans need beyond what they were made for."""
    found = [
        (each["peak"] - each["target_peak"]) / 2**20
        for each in programs.values()
        if "target_peak" in each
    ]
    return f"{min(found):.0f} to {max(found):.0f} MiB" if found else "-"


def plan_seconds(programs: Rows) -> list[float]:
    """Return the seconds of the plans that need at most the bytes of every block recomputed."""
    most = programs[BY_HAND]["peak"] if BY_HAND in programs else 0
    plans = (each for name, each in programs.items() if name not in (BASELINE, BY_HAND))
    return [each["seconds"] for each in plans if each["peak"] <= most]


def ranked(programs: Rows) -> float | None:
    """Return Spearman's rank correlation; `None` of fewer than three, or without a rate."""
    if len(programs) < 3 or any(each["stated"] is None for each in programs.values()):
        return None
    return rank_correlation(programs)


def stated_errors(programs: Rows) -> list[float]:
    """Return how far stated seconds are off, as a share of the measured ones."""
    return [
        abs(each["stated"] / each["seconds"] - 1)
        for each in programs.values()
        if each["stated"] is not None
    ]


def sizes(rows: Rows) -> list[Table]:
    """Return what ran for three steps, in how many bytes, and in how many it did not."""

    def cells(row: Any) -> Row:
        step = min(row["seconds"])
        measured = row.get("measured")
        return (
            f"{row['flops']:.3f} x",
            ", ".join(map(str, row.get("chunks", ()))) or "-",
            _memory(row["stated"]),
            row.get("why", "-") if measured is None else _memory(measured),
            seconds_text(step),
            seconds_text(row["stated_seconds"]) if row.get("stated_seconds") else "-",
            f"{row['tokens'] / step:,.0f}",
            *(_ran(row, key) for key in ("enough", "short", _sizes.MORE)),
        )

    heads = (
        "", "FLOPs", "chunks", "stated", "allocator", "step", "gradient, stated", "tokens/s",
        "as stated", "in less", "one batch more",
    )  # fmt: skip
    title = (
        "Three steps of AdamW: the gradient's peak, the fastest step, and whether the gradient "
        "runs in the stated memory and half a batch, in that less one batch (of a sequence 1,024 "
        "tokens), and one batch more"
    )
    return [_table(title, heads, rows, cells, "stated", "seconds")]


def _ran(row: Any, key: str) -> str:
    return {True: "ran", False: "out of memory", None: "-"}[row.get(key)]


def selection(rows: Rows) -> list[Table]:
    """Return milliseconds of a selection, one row a size."""
    ways = list(dict.fromkeys(name.split(maxsplit=1)[1] for name in rows))
    found: dict[str, dict[str, str]] = {}
    for name, row in rows.items():
        size, way = name.split(maxsplit=1)
        text = seconds_text(row["seconds"][1]) if "seconds" in row else "failed"
        found.setdefault(size, {})[way] = text
    lines = [(size, *(each.get(way, "") for way in ways)) for size, each in found.items()]
    errors = "\n\n".join(f"{name}: {row['error']}" for name, row in rows.items() if "error" in row)
    title = "One selection of DGC of 1/1000 of the entries, median"
    return [Table(title, ("entries", *ways), lines, errors)]


def offload(rows: Rows) -> list[Table]:
    """Return the rates of copies, and the share of them that each chain of layers hides."""
    copy = rows.get(_offload.COPY, {})
    tables = []
    if "rates" in copy:
        rates = [f"{rate / 1e9:,.1f}" for rate in copy["rates"].values()]
        note = "" if copy["copies"] else "On a CPU all memory is the host's."
        title = "Copies to pinned host memory and back, GB/s"
        tables.append(Table(title, ("", *copy["rates"]), [("rate", *rates)], note))
    heads = ("", "copied each way", "on the device", "offloaded", "copies alone", "hidden")
    others = {name: row for name, row in rows.items() if name != _offload.COPY}
    title = "Chains of layers, activations on the device and offloaded"
    cells = lambda row: _chain(row, copy)  # noqa: E731
    return [*tables, _table(title, heads, others, cells, "ways")]


def _chain(row: Any, copy: Any) -> Row:
    saved, offloaded = (row["ways"][way] for way in ("saved", "offloaded"))
    ways = (
        f"{memory_text(each['peak'])}, {seconds_text(each['seconds'])}"
        for each in (saved, offloaded)
    )
    alone = copying_seconds(row, copy)
    hidden = hidden_share(row, copy)
    return (
        memory_text(row["bytes"]),
        *ways,
        "-" if alone is None else seconds_text(alone),
        "-" if hidden is None else f"{100 * hidden:.0f} %",
    )


def copying_seconds(row: Any, copy: Any) -> float | None:
    """Return the seconds of a chain's copies alone; `None` where nothing is copied."""
    if not copy.get("copies"):
        return None
    return sum(row["bytes"] / rate for rate in copy["rates"].values())


def hidden_share(row: Any, copy: Any) -> float | None:
    """Return the share of the copies' seconds that a chain does not wait for."""
    alone = copying_seconds(row, copy)
    if alone is None:
        return None
    saved, offloaded = (row["ways"][way]["seconds"] for way in ("saved", "offloaded"))
    return 1 - (offloaded - saved) / alone


def speed(rows: Rows) -> list[Table]:
    """Return tokens a second of each policy, of the plan in as many bytes, and of the baseline."""

    def cells(row: Any) -> Row:
        tokens, found = row["batch"] * row["length"], row["seconds"]
        rate = lambda way: _rate(tokens, found.get(way))  # noqa: E731
        plan = row.get("plan")
        return (
            _memory(row["peak"]),
            rate("theirs"),
            f"{row['flops']:.3f} x",
            rate("plan"),
            f"{plan['flops']:.3f} x" if plan else "-",
            rate("plain"),
        )

    heads = ("", "peak", "tokens/s", "FLOPs", "plan's tokens/s", "plan's FLOPs", "baseline's")
    title = "GPT-2 124M: tokens a second of a policy, and of the plan within its peak"
    return [_table(title, heads, rows, cells, "seconds")]


def _rate(tokens: int, seconds: Sequence[float] | None) -> str:
    return f"{tokens / quartiles(seconds)[1]:,.0f}" if seconds else "-"


def torch(rows: Rows) -> list[Table]:
    """Return bytes and seconds of each way of PyTorch and of JAX, a table for each program."""
    heads = ("", "bytes besides arguments", "pass", "stated", "loss", "norm of the gradient")
    tables = []
    for name, row in rows.items():
        cells = [
            (
                way,
                memory_text(each["resident"]),
                seconds_text(each["seconds"]),
                seconds_text(each["stated"]) if each.get("stated") else "",
                f"{each['loss']:.3f}",
                f"{each['gradient_norm']:.3f}",
            )
            for way, each in row.get("ways", {}).items()
        ]
        errors = [row["error"]] if "error" in row else row["failed"].items()
        note = "\n\n".join(map(str, errors))
        tables.append(Table(f"PyTorch and JAX, {name}", heads, cells, note))
    return tables


def measured(rows: Rows) -> list[Table]:
    """Return seconds of the plan that was chosen by measuring, and of that by stated seconds."""

    def cells(row: Any) -> Row:
        programs = row["programs"]
        seconds_of = {name: each["seconds"] for name, each in programs.items()}
        ratios = (
            f"{seconds_of[name] / seconds_of[BASELINE]:.3f} x"
            for name in (_measured.STATED, _measured.MEASURED)
        )
        return seconds_text(seconds_of[BASELINE]), *ratios, str(row["compilations"])

    heads = ("", "baseline", _measured.STATED, _measured.MEASURED, "compilations of the latter")
    title = "Plans within half of the baseline's temporaries"
    return [_table(title, heads, rows, cells, "programs")]


TABLES: Mapping[str, Callable[[Rows], list[Table]]] = {
    "peaks": peaks,
    "seconds": seconds,
    "sizes": sizes,
    "selection": selection,
    "offload": offload,
    "speed": speed,
    "torch": torch,
    "measured": measured,
}
"""The tables of a part's rows; the first is that of the rows themselves."""
