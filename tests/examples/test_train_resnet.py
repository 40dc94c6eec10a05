"""The ResNet example as a user runs it: interrupted and resumed, on digits and on CIFAR-10."""

import json
import subprocess
import sys

import numpy as np
import pytest
import train_resnet

from tests.examples.runs import ROOT, run, run_interrupted
from tests.examples.test_cifar import write

TOY = "--steps 14 --width 4 --batch 8 --replicas 2 --rampup-step 4 --save-every 2".split()

# The published files have 10 000 images each; these have 20.
SMALL_FILES = """
import functools, sys
sys.path.insert(0, "examples")
import train_resnet
train_resnet.read_cifar = functools.partial(train_resnet.read_cifar, records=20, md5={})
train_resnet.main(sys.argv[1:])
"""


@pytest.mark.exhaustive  # train_multihost.py has the same code, and its test always runs
def test_interrupted_run_resumes_with_the_same_numbers(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    text = run("train_resnet", *TOY, "--out", str(unbroken))
    for words in ("ResNet-14 on scikit-learn's digits", "6 convolutions", "test accuracy after"):
        assert words in text
    said = run_interrupted("train_resnet", *TOY, "--out", str(broken))
    assert "--resume continues from the last save" in said
    assert len(json.loads((broken / "history.json").read_text())["steps"]) == 8
    run("train_resnet", *TOY, "--out", str(broken), "--resume")

    one, two = (json.loads((d / "figures.json").read_text()) for d in (unbroken, broken))
    # The test accuracy depends on the running averages: they are saved and restored too.
    for name in ("losses", "bytes_sent", "accuracy_before", "accuracy_after"):
        assert one[name] == two[name], name
    assert len(one["losses"]) == 14 and np.isfinite(one["losses"]).all()
    assert one["bytes_sent"][0] == one["bytes_dense"] > one["bytes_sent"][-1]
    assert one["memory"]["plain"]["peak"] > one["memory"]["recomputed"]["peak"]
    for picture in ("loss.png", "memory.png"):
        assert (unbroken / picture).stat().st_size > 10_000


@pytest.mark.exhaustive
def test_runs_on_cifar(tmp_path):
    inner = write(tmp_path, "python")
    options = "--steps 2 --width 2 --depth 14 --batch 4 --replicas 2 --dense".split()
    more = ["--data", str(inner), "--out", str(tmp_path / "out"), "--squeeze-excitation", "2"]
    done = subprocess.run(
        [sys.executable, "-c", SMALL_FILES, *options, *more],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "100 images" in done.stdout and "ResNet-14 on CIFAR-10" in done.stdout
    found = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert found["bytes_sent_last"] == found["bytes_dense"] and len(found["losses"]) == 2


def test_augmentation_shifts_and_mirrors_whole_images():
    x = np.arange(1, 1 + 200 * 6 * 6).reshape(200, 6, 6, 1)
    shifted = train_resnet.augment(x, np.random.default_rng(0), 2, True)
    assert shifted.shape == x.shape
    seen = set()
    for before, after in zip(np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0))), shifted, strict=True):
        places = [
            (i, j, mirror)
            for i in range(5) for j in range(5) for mirror in (False, True)
            if np.array_equal(before[i : i + 6, j : j + 6][:, :: -1 if mirror else 1], after)
        ]  # fmt: skip
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 50
    same = train_resnet.augment(x, np.random.default_rng(0), 0, False)
    assert np.array_equal(same, x)


def test_batches_depend_on_seed_and_step_and_are_normalised():
    source = train_resnet.Source(train_resnet.arguments(["--seed", "3"]))
    x, y = source.batch_at(5, 32)
    again, other = source.batch_at(5, 32), source.batch_at(6, 32)
    assert np.array_equal(x, again[0]) and not np.array_equal(x, other[0])
    assert x.shape == (32, 8, 8, 1) and x.dtype == np.float32 and y.dtype == np.int32
    train = source.normalised(source.images.train_x)
    assert abs(train.mean()) < 1e-5 and abs(train.std() - 1) < 1e-5
    tests = list(source.tests(most=100))
    assert sum(len(y) for _, y in tests) == len(source.images.test_y) == 359
    assert len(source.images.train_y) == 1438


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "no/such"], "train_resnet: CIFAR-10: no such file or folder: no/such"),
        (["--data", "examples"], "examples has neither data_batch_1.bin nor data_batch_1"),
        (["--data", "README.md"], "README.md .* has [0-9a-f]{32}.*kriz/cifar.html"),
        (["--resume"], "--out must have a save, got none"),
        (["--depth", "15"], "depth must be one of 18, 34, .*got 15"),
    ],
)
def test_errors(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=words):
        # As many replicas as the tests have devices; JAX has started already.
        train_resnet.main([*options, "--replicas", "8", "--out", str(tmp_path)])


def test_missing_scikit_learn_is_reported(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="scikit-learn, which is missing: pip install scikit-l"):
        train_resnet.main(["--out", str(tmp_path)])


def test_cifar_files_of_another_size_are_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"10,000 images, .* cut short.*kriz/cifar.html"):
        train_resnet.main(["--data", str(write(tmp_path, "binary")), "--out", str(tmp_path)])
