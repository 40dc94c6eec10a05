"""benchmarks.dgc.accelerators: what it counts, and what its committed results promise."""

import pathlib
import types

import jax
import pytest

from benchmarks._lib.report import opened
from benchmarks.dgc import accelerators

RESULTS = pathlib.Path(accelerators.__file__).parents[1] / "results" / "accelerators.json"
# Entries that are sent of eight leaves, to be ordered or added up.
SORTED = {"sharded": 8384, "exact_int8": 8384}


def test_operations_are_counted():
    text = """
      %a = (f32[65536]{0}, s32[65536]{0}) sort(%x, %y), dimensions={0}
      %b = ((u32[1,8]{1,0}), u32[4,8]{1,0}) all-gather-start(%c), dimensions={0}
      %d = u32[4,8]{1,0} all-gather-done(%b)
      ROOT %s = f32[1,64]{1,0} scatter(%p, %q, %r), to_apply=%add
    """
    assert accelerators.counts_of(text) == {
        "sort": 1, "all-gather": 1, "scatter": 1, "sorted": [65536]
    }  # fmt: skip


def test_a_row_of_a_compiled_step():
    here = types.SimpleNamespace(devices=jax.devices()[:4])
    row = accelerators.row_of(accelerators.compiled(here, "exact", 32, 1))
    assert (row["all-gather"], row["all-reduce"]) == (1, 1)
    assert row["aliased"] >= 3 * 4 * 32**2
    rows = {"now": {"here": {"exact": row}}}
    (table,) = accelerators.tables({"rows": rows, "leaf": 4096, "leaves": 1, "jax": "0"})
    assert table.rows[0][0] == "exact" and "1 all-reduce, 1 all-gather" in table.rows[0]


@pytest.mark.parametrize("target", accelerators.TARGETS)
def test_the_committed_figures(target):
    report = opened(RESULTS, accelerators.NAME, "rows")
    rows = report["rows"][accelerators.LABEL][target]
    assert {"exact", "blocked", "two_stage", "sharded"} <= set(rows)
    for form, row in rows.items():
        if form == "dense":
            continue
        assert (row["all-gather"], row["all-reduce"]) == (1, 1)
        assert max(row["sorted"], default=0) <= SORTED.get(form, 0)
        assert row["aliased"] >= 3 * report["leaves"] * report["leaf"]
        assert not target.startswith("h100") or row["temporaries"] < report["leaf"]
