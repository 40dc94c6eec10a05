"""Files that benchmarks go on with."""

import pytest

from benchmarks._lib.report import opened


def test_a_report_goes_on(tmp_path):
    path = tmp_path / "report.json"
    assert opened(None, "dgc.py", "toy") == {} == opened(path, "dgc.py", "toy")
    path.write_text('{"toy": true}')
    assert opened(path, "dgc.py", "toy") == {"toy": True}


@pytest.mark.parametrize("text", ["[1, 2", "", "[]", "3", '{"foo": 1}'])
def test_what_is_no_report_is_not_touched(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="^dgc.py: .*report.json .*; choose another --out"):
        opened(path, "dgc.py", "toy")
    assert path.read_text() == text
