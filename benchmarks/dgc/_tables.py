"""The tables of `dgc.py`, for a terminal and for the README."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks._lib.report import terminal_table

Rows = list[tuple[str, ...]]


def show(console: Console, report: dict[str, Any], sections: Sequence[str]) -> None:
    for section in sections:
        found = report[section]
        for title, rows in TABLES[section](found):
            console.print(terminal_table(title, rows))
        console.print(
            f"{found['device']}, {found['cores']} cores, load {found['load']}, jax {found['jax']}"
        )


def payload_tables(found: dict[str, Any]) -> list[tuple[str, Rows]]:
    """Both models in every format."""
    head = ("", "format", "default leaves, kB", "ratio", "all leaves, kB", "ratio", "of a ring")
    rows = [head]
    for name, model in found["models"].items():
        wires = dict.fromkeys(row["wire"] for row in model["rows"])
        for wire in wires:
            some, every = (row for row in model["rows"] if row["wire"] == wire)
            cells = (
                cell
                for row in (some, every)
                for cell in (f"{row['payload'] / 1e3:,.1f}", f"{row['ratio']:,.0f} x")
            )
            rows.append((name, wire, *cells, f"{every['ring_ratio']:,.0f} x"))
    title = (
        f"Payload of a replica and step at {100 * found['sparsity']:g} %, and how many times as "
        "large dense float32 is; last, bytes sent in a ring all-reduce over bytes sent by one of "
        f"{found['replicas']} replicas, all leaves compressed"
    )
    return [(title, rows)]


def replicas_tables(found: dict[str, Any]) -> list[tuple[str, Rows]]:
    """Every exchange against the number of replicas."""
    counts = [str(n) for n in found["replicas"]]
    rows = [("", *(f"N = {n}" for n in counts))]
    for name, row in found["rows"].items():
        rows.append((name, *(f"{row['sent'][n] / 1e6:,.3f}" for n in counts)))
    meets = "; ".join(
        f"{wire}: a sharded exchange sends less than a gather from N = {at['sharded'] or 'none'}, "
        f"a dense sum from N = {at['dense']:,}"
        for wire, at in found["crossover"].items()
    )
    title = (
        f"MB that one of N replicas of a {found['model']} sends in a step at "
        f"{100 * found['sparsity']:g} %, all leaves compressed ({meets})"
    )
    return [(title, rows)]


def selectors_tables(found: dict[str, Any]) -> list[tuple[str, Rows]]:
    """Times beside one pass and beside a step of momentum; masses."""
    names = list(found["layouts"])
    rows: Rows = [("", *(f"{name}, {what}" for name in names for what in ("ms", "passes")))]
    rows += _timed(found["times"], names)
    heads = [f"{name}, {what}" for name in names for what in ("ms", "of momentum")]
    steps: Rows = [("", *heads), *_timed(found["steps"], names)]
    kinds = found["mass"]
    mass: Rows = [("", *next(iter(kinds.values())))]
    mass += [(kind, *(f"{share:.4f}" for share in row.values())) for kind, row in kinds.items()]
    entries = ", ".join(
        f"{name}: {at['entries'] / 1e6:.1f} M in {at['leaves']}"
        for name, at in found["layouts"].items()
    )
    trained = found["trained"]
    return [
        (f"Selectors at {100 * found['sparsity']:g} % ({entries} leaves), medians", rows),
        ("Whole optimizer steps on one replica", steps),
        (
            "Mass: magnitudes taken, over those of the exact choice per leaf (gradients that a "
            f"{trained['model']} has accumulated in {trained['steps']} steps)",
            mass,
        ),
    ]


def _timed(found: dict[str, Any], names: Sequence[str]) -> Rows:
    """A row for each program: milliseconds and ratio of every layout."""

    def cells(row: dict[str, Any]) -> tuple[str, str]:
        low, middle, high = row["seconds"]
        ratio = row["ratio"][1]
        return f"{1e3 * middle:,.1f} ±{500 * (high - low):,.1f}", f"{ratio:,.2f}"

    return [
        (program, *(cell for name in names for cell in cells(found[name][program])))
        for program in found[names[0]]
    ]


def compile_tables(found: dict[str, Any]) -> list[tuple[str, Rows]]:
    """A ramp beside a fixed level."""
    rows: Rows = [("", "fixed, s", "ramp, s", "ratio", "of pairs", "XLA's part of the ramp")]
    for replicas, row in found["rows"].items():
        ratios = row["ratios"]
        rows.append((
            f"N = {replicas}", f"{row['fixed']['seconds']:.1f}", f"{row['ramp']['seconds']:.1f}",
            f"{row['ratio']:.2f} x", f"{ratios[0]:.2f}-{ratios[-1]:.2f}",
            f"{row['ramp']['compile'] / row['ramp']['seconds']:.0%}",
        ))  # fmt: skip
    return [("Tracing, lowering and compiling a step of a ResNet-50, five levels or one", rows)]


TABLES = {
    "payload": payload_tables,
    "replicas": replicas_tables,
    "selectors": selectors_tables,
    "compile": compile_tables,
}
