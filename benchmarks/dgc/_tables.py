"""The tables of `benchmarks.dgc.costs`, by section."""

from collections.abc import Sequence
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, megabytes, milliseconds


def tables(report: Report) -> list[Table]:
    """Return the tables of every section that the report has."""
    return [table for name in TABLES if name in report for table in TABLES[name](report[name])]


def _where(found: dict[str, Any]) -> str:
    return f"({found['device']}, {found['cores']} cores, jax {found['jax']})"


def payload_tables(found: dict[str, Any]) -> list[Table]:
    """Return the bytes of both models in every format."""
    heads = ("", "format", "default leaves, kB", "ratio", "all leaves, kB", "ratio", "of a ring")
    rows = []
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
        f"{found['replicas']} replicas, all leaves compressed {_where(found)}"
    )
    return [Table(title, heads, rows)]


def replicas_tables(found: dict[str, Any]) -> list[Table]:
    """Return the bytes of every exchange by number of replicas."""
    counts = [str(n) for n in found["replicas"]]
    rows = [
        (name, *(megabytes(row["sent"][n], 3) for n in counts))
        for name, row in found["rows"].items()
    ]
    meets = "; ".join(
        f"{wire}: a sharded exchange sends less than a gather from N = {at['sharded'] or 'none'}, "
        f"a dense sum from N = {at['dense']:,}"
        for wire, at in found["crossover"].items()
    )
    title = (
        f"MB that one of N replicas of a {found['model']} sends in a step at "
        f"{100 * found['sparsity']:g} %, all leaves compressed ({meets}) {_where(found)}"
    )
    return [Table(title, ("", *(f"N = {n}" for n in counts)), rows)]


def selectors_tables(found: dict[str, Any]) -> list[Table]:
    """Return times beside one pass, times beside a step of momentum, and selected magnitudes."""
    mass = found["mass"]
    rows = [(kind, *(f"{share:.4f}" for share in row.values())) for kind, row in mass.items()]
    entries = ", ".join(
        f"{name}: {at['entries'] / 1e6:.1f} M in {at['leaves']}"
        for name, at in found["layouts"].items()
    )
    trained, where = found["trained"], _where(found)
    selectors = f"Selectors at {100 * found['sparsity']:g} % ({entries} leaves), medians {where}"
    magnitudes = (
        "Mass: magnitudes taken, over those of the exact choice per leaf (gradients that a "
        f"{trained['model']} has accumulated in {trained['steps']} steps) {where}"
    )
    names = list(found["layouts"])
    return [
        _timed(selectors, found["times"], names, "passes"),
        _timed(f"Whole optimizer steps on one replica {where}", found["steps"], names,
               "of momentum"),
        Table(magnitudes, ("", *next(iter(mass.values()))), rows),
    ]  # fmt: skip


def _timed(title: str, found: dict[str, Any], names: Sequence[str], ratio: str) -> Table:
    """Return a row for each program: milliseconds and ratio of every layout."""

    def cells(row: dict[str, Any]) -> tuple[str, str]:
        low, middle, high = row["seconds"]
        spread = milliseconds((high - low) / 2)
        return f"{milliseconds(middle)} ±{spread}", f"{row['ratio'][1]:,.2f}"

    rows = [
        (program, *(cell for name in names for cell in cells(found[name][program])))
        for program in found[names[0]]
    ]
    heads = (f"{name}, {what}" for name in names for what in ("ms", ratio))
    return Table(title, ("", *heads), rows)


def compile_tables(found: dict[str, Any]) -> list[Table]:
    """Return compile times of a ramp beside those of a fixed level."""
    heads = ("", "fixed, s", "ramp, s", "ratio", "of pairs", "XLA's part of the ramp")
    rows = []
    for replicas, row in found["rows"].items():
        ratios = row["ratios"]
        rows.append((
            f"N = {replicas}", f"{row['fixed']['seconds']:.1f}", f"{row['ramp']['seconds']:.1f}",
            f"{row['ratio']:.2f} x", f"{ratios[0]:.2f}-{ratios[-1]:.2f}",
            f"{row['ramp']['compile'] / row['ramp']['seconds']:.0%}",
        ))  # fmt: skip
    title = "Tracing, lowering and compiling a step of a ResNet-50, five levels or one"
    return [Table(f"{title} {_where(found)}", heads, rows)]


TABLES = {
    "payload": payload_tables,
    "replicas": replicas_tables,
    "selectors": selectors_tables,
    "compile": compile_tables,
}
