"""The benchmark of AutoChunker's peaks: its promises on the stored figures, its table."""

import pytest

from benchmarks._lib.report import result
from benchmarks.memory import autochunker
from benchmarks.memory.autochunker import MOST_FLOPS, PEAKS, problems, tables


def test_the_stored_plans_need_no_more_than_autochunker():
    report = result("autochunker")
    assert problems(report) == [] and list(report["rows"]) == list(PEAKS)
    for name, row in report["rows"].items():
        assert row["peak"] <= row["budget"] == PEAKS[name] and row["flops"] < MOST_FLOPS
    (table,) = tables(report)
    assert len(table.rows) == 1 + len(PEAKS)


def test_what_breaks_a_promise_is_told():
    row = {"budget": 100, "peak": 90, "flops": 1.0}
    rows = {"4": row | {"peak": 101}, "8": row | {"flops": 1.02}, "16": {"budget": 1, "least": 2}}
    assert problems({"toy": False, "rows": rows | {"32": row}}) == [
        "4: no plan within 100 bytes", "8: 1.020 x the FLOPs", "16: no plan within 1 bytes"
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_a_toy_run_is_continued(tmp_path):
    out = str(tmp_path / "autochunker.json")
    report = autochunker.main(["--toy", "--out", out])
    assert all(row["peak"] <= row["budget"] for row in report["rows"].values())
    assert autochunker.main(["--toy", "--out", out])["rows"] == report["rows"]
