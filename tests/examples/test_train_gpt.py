"""The example as a user runs it: interrupted, resumed, and the files that it writes."""

import json

import numpy as np
import pytest
import train_gpt

from tests.examples.runs import run, run_interrupted

TOY = "--steps 60 --layers 1 --width 64 --length 32 --rampup-step 6 --save-every 2".split()


@pytest.mark.exhaustive  # train_multihost.py has the same code, and its test always runs
def test_interrupted_run_resumes_with_the_same_numbers(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    text = run("train_gpt", *TOY, "--out", str(unbroken))
    for words in ("held-out loss after", "with the plan", "dense all-reduce", "sent, last step"):
        assert words in text

    said = run_interrupted("train_gpt", *TOY, "--out", str(broken))
    assert "--resume continues from the last save" in said and "held-out loss after" not in said
    # The ninth step was taken and is lost: the last save has eight.
    assert len(json.loads((broken / "history.json").read_text())["steps"]) == 8
    run("train_gpt", *TOY, "--out", str(broken), "--resume")

    one, two = (json.loads((d / "figures.json").read_text()) for d in (unbroken, broken))
    for name in ("losses", "bytes_sent", "held_out_before", "held_out_after"):
        assert one[name] == two[name], name
    assert len(one["losses"]) == 60 and np.isfinite(one["losses"]).all()
    assert one["bytes_sent"][0] == one["bytes_dense"] > one["bytes_sent"][-1]
    assert one["memory"]["plain"]["peak"] >= one["memory"]["recomputed"]["peak"]
    for picture in ("loss.png", "memory.png"):
        assert (unbroken / picture).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--text", "no/such/file"],
            "--text must be a file or folder, got no/such/file, which does not exist",
        ),
        (["--steps", "0"], "--steps must be a whole number >= 1, got 0"),
        (["--resume"], "--out must have a save, got none"),
        (["--heads", "3"], "heads must divide width, got heads=3"),
    ],
)
def test_errors(more, words, tmp_path, capfd):
    # The tests' processes have eight devices.
    with pytest.raises(SystemExit) as stopped:
        train_gpt.main([*TOY, "--replicas", "8", "--out", str(tmp_path), *more])
    assert stopped.value.code not in (0, None)
    assert words in f"{' '.join(capfd.readouterr())} {stopped.value}"
