"""The benchmark of training steps: baselines, whole rounds, what is kept and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks.network import _training_methods as methods_of
from benchmarks.network import _training_tables, training
from benchmarks.network._jax_training import Method, config_of
from benchmarks.network._worker import batches
from jrc.models import gpt
from tests.examples.runs import run_python

MODEL = methods_of.TOY_MODEL
CONFIG = config_of(MODEL)


def block(seconds, digests=(1, 1), losses=(2.0, 2.0), **figures):
    """A block as `training.block` returns it, of two processes."""
    return {
        "steps": 2, "seconds": seconds, "sent": 30.0, "digest": list(digests),
        "bytes": [20.0, 20.0], "loss": list(losses), **figures,
    }  # fmt: skip


def test_every_method_comes_with_its_baseline():
    assert methods_of.with_baselines(["dgc", "adamw"]) == ["alone", "adamw", "alone_sgd", "dgc"]
    assert training.BENCHMARK.parse(["--methods", "ddp"]).methods == ["alone_torch", "ddp"]
    for name, method in methods_of.METHODS.items():
        assert methods_of.exchanges(name) == (not name.startswith("alone"))
        assert methods_of.METHODS[method.baseline].torch == method.torch


def test_blocks_are_whole_rounds():
    options = training.BENCHMARK.parse(["--rounds", "2", "--steps", "3"])
    found = {name: training.steps_of(name, options) for name in options.methods}
    assert (found["sparseloco_30"], found["diloco"], found["adamw"], found["ddp"]) == (60, 30, 3, 3)
    assert found["alone"] == found["alone_torch"] == 6


def test_baselines_are_measured_at_both_ends_of_a_turn():
    assert training.in_turn(["alone", "adamw", "alone_sgd", "dgc"]) == [
        *("alone", "adamw", "alone_sgd", "dgc"),
        *("alone", "alone_sgd"),
    ]


def test_utilisation_is_of_the_slowest_process():
    blocks = {
        "alone": [block([1.0, 2.0]), block([4.0, 3.0])],
        "adamw": [block([5.0, 6.0]), block([6.0, 6.0], sent=50.0)],
    }
    found = training.summary(blocks)
    assert found["alone"]["seconds"] == 3.0 and found["adamw"]["blocks"] == [6.0, 6.0]
    assert found["adamw"]["utilisation"] == 0.5
    assert found["adamw"]["bytes_sent"] == 40.0 and found["adamw"]["bytes_predicted"] == 20.0
    assert training.summary({"alone": [block([1.0], sent=None)]})["alone"]["bytes_sent"] is None


def test_unequal_parameters_and_infinite_losses_are_problems():
    blocks = {
        "alone": [block([1.0], digests=(None, None))],
        "adamw": [block([1.0]), block([1.0], digests=(1, 2))],
        "ddp": [block([1.0], losses=(1.0, float("nan")))],
    }
    first, second = training.broken("here", blocks)
    assert "here: parameters of adamw differ" in first and "loss of ddp" in second
    assert list(training.problems({"broken": [first]})) == [first]


class Answers:
    """Processes that answer as told."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def ask(self, request, **arguments):
        self.asked.append((request, arguments))
        return self.answers.get(request)

    def transfer(self, nbytes):
        return [90.0, 95.0]


def test_bytes_of_a_block_are_counted_around_its_steps_alone():
    ended = [{"digest": 7, "bytes": 20.0, "loss": 2.0}] * 2
    group = Answers(counters=None, steps=[[1.0, 2.0], [2.0, 2.0]], end=ended)
    group.answers["counters"] = [{"sent": 10, "received": 0}] * 2
    found = training.block(group, "adamw", 2)
    assert found["seconds"] == [1.5, 2.0] and found["sent"] == 0 and found["digest"] == [7, 7]
    assert [name for name, _ in group.asked] == ["begin", "counters", "steps", "counters", "end"]


def test_other_links_and_methods_are_kept():
    ended = [{"digest": 7, "bytes": 20.0, "loss": 2.0}] * 2
    counters = [{"sent": 10, "received": 0}] * 2
    group = Answers(counters=counters, steps=[[1.0, 2.0], [2.0, 2.0]], end=ended)
    old = {
        "2 processes, 10 Mbit/s": {"processes": 2, "mbit": 10, "methods": {}},
        "2 processes, 100 Mbit/s": {
            "processes": 2, "mbit": 100, "methods": {"adamw": "old", "dgc": "kept"}
        },
        "2 processes, no limit": {"processes": 2, "mbit": None, "methods": {}},
    }  # fmt: skip
    report = {"runs": old, "broken": []}
    options = training.BENCHMARK.parse(["--toy", "--methods", "adamw"])
    run = training.Run(options, report, None, lambda text: None)
    links = training.links_for(2, False)
    training.measure_link(links, 100, {"alone": group, "adamw": group}, run)
    rates = [name.split(", ")[1] for name in report["runs"]]
    assert rates == ["no limit", "100 Mbit/s", "10 Mbit/s"]
    row = report["runs"]["2 processes, 100 Mbit/s"]
    assert list(row["methods"]) == ["alone", "adamw", "dgc"] and row["methods"]["dgc"] == "kept"
    assert row["methods"]["adamw"]["seconds"] == 2.0 and row["measured_mbit"] == [90.0, 95.0]


def test_a_method_has_a_row_and_a_link_two_columns():
    at = training.summary({"alone": [block([1.0])], "adamw": [block([4.0])]})
    row = {"methods": at, "measured_mbit": [94.0, 95.0]}
    report = {
        "runs": {"100": row, "1000": {**row, "methods": {"alone": at["alone"]}}},
        "model": MODEL, "parameters": 1e6, "cores": 2, "device": "cpu", "jax": "0", "load": 1.0,
    }  # fmt: skip
    (table,) = _training_tables.tables(report)
    assert [row[2:6] for row in table.rows] == [
        ("1.00", "-", "1.00", "-"),
        ("4.00", "25.0%", "-", "-"),
    ]
    assert table.heads[2:4] == ("100: s", "computing") and "94, 94 Mbit/s" in table.title
    assert _training_tables.tables({**report, "runs": {}})[0].rows == []


def test_another_model_is_not_added_to_a_file(tmp_path):
    out = tmp_path / "training.json"
    out.write_text(json.dumps({"runs": {}, "toy": True, "model": {"layers": 3}}))
    with pytest.raises(SystemExit, match="--out must have figures of the same model"):
        training.main(["--toy", "--out", str(out)])


@pytest.mark.exhaustive
def test_a_block_has_a_whole_round_and_what_arrives_late():
    """One process with two replicas, each with a batch of its own."""
    mesh = Mesh(jax.devices()[:2], ("data",))
    sets = [np.concatenate([batches(MODEL, rank, i) for rank in range(2)]) for i in range(3)]
    found = {}
    for name in ("sparseloco_15", "sparseloco_15_overlap"):
        method = Method(name, CONFIG, mesh)
        method.begin(method.about.overlap)
        before = np.asarray(method._state.params["tokens"])
        for _ in range(method.about.every):
            method.step(sets)
        assert sum(bool(info.synchronised) for info in method._infos) == 1
        # What was exchanged has arrived in the shared parameters.
        assert np.any(np.asarray(method._state.params["tokens"]) != before)
        found[name] = method.end()
    sparse, late = found.values()
    assert sparse["bytes"] == late["bytes"] > 0 and sparse["digest"] is not None


@pytest.mark.exhaustive
def test_pytorch_s_model_is_that_of_jrc():
    torch = pytest.importorskip("torch")
    from benchmarks.network._torch_training import Model

    config = dataclasses.replace(CONFIG, scan=False)
    params = gpt.init(jax.random.key(0), config)
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), x)
        for path, x in jax.tree.leaves_with_path(params)
    ]
    model = Model([(path, x.shape) for path, x in named], CONFIG.heads)
    for leaf, (_, x) in zip(model.leaves, named, strict=True):
        leaf.data = torch.from_numpy(np.array(x))
    tokens = batches(MODEL, 0, 0)
    mask = torch.ones(CONFIG.length, CONFIG.length, dtype=torch.bool).triu(1)
    loss = model(torch.from_numpy(tokens).long(), mask)
    assert loss.item() == pytest.approx(float(gpt.loss(params, tokens, config=config)), rel=1e-4)


@pytest.mark.exhaustive
def test_two_processes_train_on_loopback(tmp_path):
    out = ("--out", str(tmp_path / "training.json"))
    # Parameters that differ between processes would end it.
    run_python("-m", "benchmarks.network.training", "--toy", "--methods", "adamw,diloco", *out)
    report = json.loads((tmp_path / "training.json").read_text())
    (row,) = report["runs"].values()
    assert list(row["methods"]) == ["alone", "adamw", "diloco"] and row["loopback"]
    adamw, diloco = row["methods"]["adamw"], row["methods"]["diloco"]
    # A ring of two: each sends as many floats as there are.
    assert adamw["bytes_predicted"] >= 4 * report["parameters"]
    assert diloco["bytes_predicted"] == pytest.approx(adamw["bytes_predicted"] / 15, rel=0.01)
    assert (adamw["steps"], diloco["steps"]) == (2, 15)
    alone = row["methods"]["alone"]
    assert alone["steps"] == 4 and len(alone["blocks"]) == 2
