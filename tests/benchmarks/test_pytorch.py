"""PyTorch beside jrc: both compute the same, and without PyTorch only jrc is measured."""

import importlib.util
import json

import pytest

from benchmarks._lib import child
from benchmarks._lib import report as report_files
from benchmarks._lib.gradient import Cache
from benchmarks._models.catalogue import MODELS
from benchmarks._models.planner import Planner
from benchmarks.pytorch import _front, saved_bytes
from benchmarks.pytorch._plot import plot
from benchmarks.pytorch._programs import PROGRAMS, missing
from benchmarks.pytorch._tables import by_torch, tables
from benchmarks.readme._parts import PARTS
from tests.examples.runs import run_python

LEAN = {"saved": 0, "product_flops": 1300}
NOTHING = {"saved": 900, "product_flops": 1000}


def made_up(**ways):
    """A report of a run that has these ways of PyTorch."""
    agrees = {"loss": 5.0, "gradients_differ": 0.0}
    found = {
        "title": "GPT",
        "tolerance": 1e-5,
        "nothing": NOTHING,
        "jrc": {"loss": 5.0, "gradient_norm": 2.0},
        "about": {"torch": "2.15", "gradient_norm": 2.0},
        "ways": {name: row if "missing" in row else agrees | row for name, row in ways.items()},
        "front": [LEAN, NOTHING],
        "plans": [{"budget": 0.5, "peak": 2_000_000, **NOTHING, "least": NOTHING}],
        "hand": {"every block re-run": {"saved": 100, "product_flops": 1250, "least": LEAN}},
    }
    return {"device": "cpu", "jax": "0.12", "models": {"gpt": found}}


EAGER = {"saved": 2_000_000, "product_flops": 1000, "least": NOTHING}


@pytest.fixture(scope="module")
def planner():
    return Planner(MODELS["gpt"](True), Cache(None, quick=True))


@pytest.fixture(scope="module")
def front(planner):
    return _front.Front(planner)


@pytest.mark.exhaustive
def test_the_front_has_the_figures_of_its_programs(front, planner):
    plain = _front.counted(planner, planner.model.fn)
    curve = front.curve()
    places = range(0, len(curve), 4)
    assert [front.at(i) for i in places] == [curve[i] for i in places]
    assert len(places) > 3 and curve[0]["saved"] == 0
    assert curve[-1]["product_flops"] == plain["product_flops"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_front_is_monotone_and_its_choices_fit(front):
    curve = front.curve()
    assert all(a["saved"] < b["saved"] for a, b in zip(curve, curve[1:], strict=False))
    flops = [row["product_flops"] for row in curve]
    assert all(a > b for a, b in zip(flops, flops[1:], strict=False))
    middle = curve[len(curve) // 2]
    assert front.within(middle["saved"]) == front.within(middle["saved"] + 1) == middle


@pytest.mark.exhaustive
def test_no_way_by_hand_is_below_the_front(front, planner):
    rows = dict(_front.by_hand(planner))
    assert len(rows) == 5
    for name, row in rows.items():
        assert front.within(row["saved"])["product_flops"] <= row["product_flops"], name


@pytest.mark.exhaustive  # .ci/run runs the toy size, too
def test_without_pytorch_there_is_jrcs_side(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "peers.json"
    report = saved_bytes.main(
        ["--toy", "--models", "gpt", "--out", str(out), "--plot", str(tmp_path)]
    )
    said = capsys.readouterr().out
    assert "PyTorch is missing, only jrc's side: pip install torch" in said
    assert (tmp_path / "peers.png").exists()
    assert json.loads(out.read_text()) == report
    found = report["models"]["gpt"]
    assert "ways" not in found and len(tables(report)) == 1
    assert found["front"][0]["saved"] == 0 and len(found["hand"]) == 5
    assert [row["budget"] for row in found["plans"]] == list(saved_bytes.TOY["plans"])


def test_both_compute_the_same(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "peers.json"
    run_python(
        "-m", "benchmarks.pytorch.saved_bytes", "--toy", "--models", "gpt", "--platform", "cpu",
        "--out", str(out),
    )  # fmt: skip
    report = json.loads(out.read_text())
    assert list(saved_bytes.problems(report)) == []
    found = report["models"]["gpt"]
    ways, products = found["ways"], found["nothing"]["product_flops"]
    first = ["eager", "checkpoint 1", "budget 1.0", "budget 0.3", "budget 0.0"]
    assert list(ways)[:5] == first and len(ways) <= 7
    assert ways["eager"]["product_flops"] == ways["budget 1.0"]["product_flops"] == products
    assert [ways[f"budget {b}"]["knapsack"] for b in ("1.0", "0.3", "0.0")] == [False, True, False]
    assert ways["budget 0.0"]["saved"] == 0
    assert 3 * ways["budget 0.0"]["product_flops"] == 4 * products
    sizes = [ways[name]["saved"] for name in first]
    assert sizes[0] >= sizes[2] > sizes[3] > sizes[4]
    assert 0 < ways["checkpoint 1"]["saved"] < sizes[0] / 2
    for row in ways.values():
        assert row["least"]["saved"] <= row["saved"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "gpt"])
def test_every_twin_computes_the_same(name):
    pytest.importorskip("torch")
    if package := missing(name):
        pytest.skip(f"{package} is not installed: it is in the extra `zoo`")
    program = PROGRAMS[name](True)
    planner = Planner(program.model, Cache(None))
    ways = dict(saved_bytes.of_torch(name, program, (), (), lambda text: None))
    found = {
        "tolerance": program.tolerance,
        "jrc": saved_bytes.reference(program),
        "nothing": _front.counted(planner, program.model.fn),
        "about": ways.pop("about"),
        "ways": ways,
    }
    assert list(saved_bytes.problems({"models": {name: found}})) == []
    assert 0 < ways["checkpoint 1"]["saved"] < ways["eager"]["saved"]


def test_differences_are_reported():
    same = made_up(eager=EAGER)
    assert list(saved_bytes.problems(same)) == []
    other = made_up(eager=EAGER | {"loss": 5.1, "gradients_differ": 0.01, "product_flops": 1001})
    other["models"]["gpt"]["about"]["gradient_norm"] = 2.1
    assert list(saved_bytes.problems(other)) == [
        "gpt: norm of the gradient: 2.1 in PyTorch, 2.0 in JAX",
        "gpt: product FLOPs of the baseline: 1,001 in PyTorch, 1,000 in JAX",
        "gpt: eager: the loss is 5.1 in PyTorch, 5.0 in JAX",
        "gpt: eager: gradients differ by 1.0e-02",
    ]


def test_a_row_has_both_and_the_difference():
    lean = {"saved": 1_000_000, "product_flops": 1100, "knapsack": True}
    lean["least"] = {"saved": 900_000, "product_flops": 1045}
    dear = lean | {"knapsack": False, "least": {"saved": 0, "product_flops": 1210}}
    report = made_up(**{"eager": EAGER, "budget 0.5": lean, "budget 0.4": dear})
    beside, own = tables(report)
    assert "PyTorch 2.15 on CPU" in beside.title
    assert beside.rows == [
        ("baseline", "hand", "2.0", "1.0000", "0.0", "1.0000", "+0.00 %"),
        ("budget 0.5", "knapsack", "1.0", "1.1000", "0.9", "1.0450", "-5.00 %"),
        ("budget 0.4", "a cut", "1.0", "1.1000", "0.0", "1.2100", "+10.00 %"),
    ]
    assert own.rows == [
        ("a plan at 0.5", "2.0", "0.0", "1.0000", "0.0", "1.0000", "+0.00 %"),
        ("by hand: every block re-run", "-", "0.0", "1.2500", "0.0", "1.3000", "+4.00 %"),
    ]


def test_other_programs_have_a_row_each():
    lean = {"saved": 1_000_000, "product_flops": 1100, "knapsack": True}
    lean["least"] = {"saved": 900_000, "product_flops": 1133}
    (found,) = made_up(**{"eager": EAGER, "budget 0.5": lean})["models"].values()
    found["plans"] = [{"budget": 0.0, "peak": 0, "saved": 1_500_000, "product_flops": 1210}]
    found["plans"][0]["least"] = lean["least"]
    alone = {name: each for name, each in found.items() if name not in ("ways", "about", "jrc")}
    report = {"device": "cpu", "jax": "0.12", "models": {"unet": found, "densenet": alone}}
    ways, plans = tables(report)
    assert ways.rows == [("GPT", "-", "-", "1.0: 1.100 (+3.00 %)", "-", "+3.00 %")]
    assert plans.rows == [
        ("GPT", "1.5: 1.210 / 1.100 / 1.133"),
        ("GPT", "1.5: 1.210 / - / 1.133"),
    ]
    assert by_torch(found, 999_999) is None
    assert plot(report, None) is None


def test_what_a_pytorch_lacks_is_skipped_with_a_reason(tmp_path):
    lacks = {"missing": "AttributeError: no activation_memory_budget"}
    report = made_up(**{"eager": EAGER, "budget 0.5": lacks})
    beside, _, missing = tables(report)
    assert missing.rows == [("budget 0.5", "AttributeError: no activation_memory_budget")]
    assert list(saved_bytes.problems(report)) == [] and len(beside.rows) == 1
    assert plot(report, tmp_path) == tmp_path / "peers.png"


@pytest.mark.slow
def test_a_failing_process_raises_with_its_errors(monkeypatch, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho this PyTorch is broken >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(broken))
    program = PROGRAMS["gpt"](True)
    with pytest.raises(
        RuntimeError, match="benchmarks.pytorch._torch failed:\nthis PyTorch is broken"
    ):
        dict(saved_bytes.of_torch("gpt", program, (), (), print))


def test_a_missing_file_makes_an_empty_part(monkeypatch, tmp_path):
    monkeypatch.setattr(report_files, "RESULTS", tmp_path)
    assert PARTS["peers"]() == ""
    (tmp_path / "peers.json").write_text(json.dumps(made_up(eager=EAGER)))
    text = PARTS["peers"]()
    assert text.count("|---") == 14 and "peers.png" not in text
    (tmp_path / "peers.png").touch()
    assert "(results/peers.png)" in PARTS["peers"]()
