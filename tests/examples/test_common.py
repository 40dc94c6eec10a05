"""What all training examples show: help, bar and table in 80 columns, pictures of one style."""

import argparse
import importlib
import io
import pathlib

import common
import pictures
import pytest
from rich.console import Console

from jrc.remat._report.plot import _COLOURS

FOLDER = pathlib.Path(common.__file__).parent
WITH_OPTIONS = sorted(
    path.stem for path in FOLDER.glob("*.py") if "= common.parser(" in path.read_text()
)
FOUND = {
    "settings": {"dense": False, "steps": 400, "rampup_step": 100, "depth": 14},
    "bytes_dense": 123_456_789.0,
    "bytes_sent_mean": 1_121_536.0,
    "bytes_sent_last": 64_032.0,
    "step_seconds_median": 12.345,
    "largest_tensor": 4096,
    "memory": {kind: {"peak": 123_456_789} for kind in ("plain", "recomputed")},
}


@pytest.fixture
def written(monkeypatch):
    """Return what the examples print in a terminal of 80 columns."""
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(common, "console", console)
    return file


def test_the_table_loses_no_digits_in_80_columns(written):
    common.show(FOUND, "A run", [("held-out loss after", "2.556 nats/byte", "")])
    text = written.getvalue()
    for number in ("123.5 MB", "64.03 kB", "1.122 MB", "117.7 MiB", "12,345 ms", "1/1,928.0"):
        assert number in text
    assert "…" not in text and max(map(len, text.splitlines())) <= 80


def test_the_bar_loses_no_digits_in_80_columns(written):
    with common.progress_bar() as bar:
        shown = common.shown_of(10.555, 12.345, 5_351_424.0, 0.015625, 12)
        bar.add_task("", total=1000, completed=999, **shown)
    text = written.getvalue()
    for number in ("999/1000", "loss 10.555", "12,345 ms", "5.351 MB sent, 1.56 %", "12 skipped"):
        assert number in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"settings": FOUND["settings"] | {"steps": 6}}, "end in the warm-up (--rampup-step 100)"),
        ({}, "below min_size and stays dense: the largest has 4,096 entries"),
        ({"bytes_dense": 0.0}, "one replica has nobody to send to"),
    ],
)
def test_a_run_that_sent_as_much_as_dense_says_why(more, words):
    dense = FOUND | {"bytes_sent_last": FOUND["bytes_dense"]} | more
    assert words in common.why_dense(dense)
    assert not common.why_dense(dense | {"settings": FOUND["settings"] | {"dense": True}})
    assert not common.why_dense(FOUND)


def test_help_shows_every_option_with_its_default(capsys):
    parser = common.parser("One line.\n\n    python examples/this.py\n")
    common.add_options(parser, "runs/this", steps=7, batch=2, unit="images")
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "python examples/this.py" in text
    assert "steps in all (default: 7)" in text and "(default: None)" not in text
    assert all(action.help for action in parser._actions)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_every_option_of_every_example_has_help(name, monkeypatch):
    module, seen = importlib.import_module(name), []
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, *args):
        seen.extend(self._actions)
        return original(self, ["--help"])

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    read = module.arguments if hasattr(module, "arguments") else module.main
    with pytest.raises(SystemExit):
        read([])
    assert seen and all(action.help for action in seen)


def test_the_warm_up_ends_where_the_bytes_stay_few():
    assert pictures.warm_up_end({"bytes_sent": [9.0, 9.0, 5.0, 1.0, 1.0]}) == 3
    assert pictures.warm_up_end({"bytes_sent": [9.0, 9.0]}) is None
    assert pictures.warm_up_end({"bytes_sent": [0.0, 5.0, 0.0, 5.0]}) is None  # rounds


def test_pictures_have_the_colours_of_the_library():
    assert _COLOURS[:4] == (pictures.RED, pictures.BLUE, pictures.GREEN, pictures.PURPLE)


def test_bytes_are_written_in_units():
    assert [pictures.network(x) for x in (12, 64_032, 5_351_424)] == [
        "12 B",
        "64.03 kB",
        "5.351 MB",
    ]
    assert pictures.memory(1.5 * 2**20) == "1.5 MiB"
