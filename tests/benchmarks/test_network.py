"""The network benchmark: bytes and ratios, names of rows, limited links and their removal."""

import importlib.util
import json
import os
import pathlib
import socket
import subprocess

import pytest

from benchmarks.network import _bytes, _links, _rounds, _tables, steps
from benchmarks.network._links import Links, Loopback, counters, limit_command
from tests.examples.runs import run_python

NAMES = f"jrc-{os.getpid()}-"
needs_links = pytest.mark.skipif(
    bool(reason := _links.why_not()), reason=f"no slow links: {reason}"
)


def remaining():
    places = [pathlib.Path("/run/netns"), _links.HOSTS]
    return [x.name for place in places if place.exists() for x in place.glob(f"{NAMES}*")]


def inside(links, rank, *command):
    done = subprocess.run([*links.enter(rank), *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_burst_is_small_beside_a_payload():
    limited = limit_command("here", "jrc0", 1000)
    expected = "tc -n here qdisc replace dev jrc0 root tbf rate 1000mbit burst 70000b latency 50ms"
    assert " ".join(limited) == expected
    assert "16000b" in limit_command("here", "jrc0", 100)
    assert limit_command("here", "jrc0", None)[3:] == ["qdisc", "delete", "dev", "jrc0", "root"]


def test_counters_are_read_per_interface(tmp_path):
    folder = tmp_path / "jrc0" / "statistics"
    folder.mkdir(parents=True)
    (folder / "tx_bytes").write_text("1500\n")
    (folder / "rx_bytes").write_text("66\n")
    assert counters("jrc0", str(tmp_path)) == {"sent": 1500, "received": 66}


def test_bytes_of_a_step_are_those_of_one_process():
    before = [{"sent": 100, "received": 0}, {"sent": 1000, "received": 5}]
    after = [{"sent": 300, "received": 9}, {"sent": 1600, "received": 9}]
    assert _rounds.sent_a_step(before, after, 4) == (200 + 600) / 2 / 4
    assert _rounds.sent_a_step([None, None], [None, None], 4) is None


def test_medians_and_ratios_are_side_by_side():
    found = {
        "dense": {"blocks": [[4.0, 6.0], [9.0, 9.0]], "sent": [100.0, 120.0]},
        "dgc": {"blocks": [[1.0, 1.0], [1.0, 5.0]], "sent": [None, None]},
    }
    row = _rounds.summary(found, {"dense": 90.0, "dgc": 2.0})
    assert row["dense"]["seconds"] == 7.5 and row["dense"]["least"] == 4.0
    assert row["dgc"]["seconds"] == 1.0 and row["ratio"] == 7.5
    assert row["ratios"] == [3.0, 5.0]
    assert (row["dense"]["bytes_sent"], row["dgc"]["bytes_sent"]) == (110.0, None)
    assert "ratio" not in row["dense"] and "ratio" not in row["dgc"]


def test_ratios_of_peers_are_to_dgc_too():
    found = {
        "dgc": {"blocks": [[1.0], [2.0]], "sent": [5.0, 5.0]},
        "ddp": {"blocks": [[4.0], [6.0]], "sent": [70.0, 90.0]},
    }
    row = _rounds.summary(found, {"dgc": 4.0, "ddp": 75.0})
    assert row["ddp"]["ratio"] == 5.0 / 1.5 and row["ddp"]["ratios"] == [3.0, 4.0]
    assert row["ddp"]["bytes_sent"] == 80.0 and row["ddp"]["bytes_predicted"] == 75.0
    assert "ratio" not in row and "dense" not in row


def test_a_method_that_a_row_lacks_is_a_dash():
    at = {"seconds": 1.0, "quartiles": [1.0, 1.0], "bytes_sent": None, "bytes_predicted": 2e6}
    old = {"dense": at, "dgc": at, "ratio": 7.0, "ratios": [6.0, 8.0], "measured_mbit": [90.0]}
    new = old | {"powersgd": at | {"ratio": 3.0, "ratios": [2.0, 4.0]}}
    report = {"parameters": 5, "leaves": 1, "cores": 2, "device": "cpu", "jax": "0.12"}
    report["runs"] = {"old": old}
    assert _tables.methods_of(report) == ["dense", "dgc"]
    report["runs"]["new"] = new
    assert _tables.methods_of(report) == ["dense", "dgc", "powersgd"]
    assert _tables.ratios_table(report).rows == [
        ("old", "7.0 (6.0-8.0)", "-"),
        ("new", "7.0 (6.0-8.0)", "3.0 (2.0-4.0)"),
    ]
    old, new = _tables.steps_table(report).rows
    assert old[:2] == ("old", "90") and old[4] == "-" and new[4] == "1,000 (1,000–1,000)"
    assert (old[5:7], new[5:7]) == (("7.0", "-"), ("7.0", "3.0"))


def test_kernels_are_matrices_of_their_outputs():
    assert _bytes.in_torch((3, 5, 16, 32)) == (32, 16, 3, 5)
    assert _bytes.in_torch((128, 10)) == (10, 128)
    assert _bytes.in_torch((64,)) == (64,)


def test_powersgd_sends_two_factors_where_that_is_less_than_half():
    assert _bytes.powersgd_entries([(64, 64, 3, 3)]) == 64 + 64 * 9
    assert _bytes.powersgd_entries([(64,)]) == 64
    # 2 (4 + 4) is not less than 16; 2 (4 + 5) is less than 20.
    assert _bytes.powersgd_entries([(4, 4), (4, 5)]) == 16 + 9
    assert _bytes.ring(1000, 2) == 4000 and _bytes.ring(1000, 4) == 6000


def test_peers_are_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    why = "there is no PyTorch here (`pip install torch`)"
    assert steps.left_out(False, "cpu") == {"ddp": why, "powersgd": why}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert steps.left_out(False, "cpu") == {}
    assert steps.left_out(True, "cpu") == {
        "powersgd": "one leaf is no matrix (leave out `--one-leaf`)"
    }
    assert set(steps.left_out(False, "gpu")) == {"ddp", "powersgd"}


def test_methods_are_chosen_beside_dgc(capsys):
    assert steps.BENCHMARK.parse(["--methods", "dgc,ddp"]).methods == ["dgc", "ddp"]
    for wrong in ("dense", "dgc,horovod"):
        with pytest.raises(SystemExit):
            steps.BENCHMARK.parse(["--methods", wrong])
        assert "--methods: must " in capsys.readouterr().err


def test_parameters_that_differ_are_found():
    same = [{"dense": 1, "dgc": 2}, {"dense": 1, "dgc": 2}]
    assert steps.differing([same, [{"ddp": 3}, {"ddp": 3}]]) == []
    assert steps.differing([same, [{"ddp": 3}, {"ddp": 4}]]) == ["ddp"]


def test_a_row_names_what_is_not_the_default():
    links = Links(2)
    assert steps.row_name(links, 1000, {}) == "2 processes, 1 Gbit/s"
    name = steps.row_name(links, None, {"wire": "bf16", "min_size": 0})
    assert name == "2 processes, no limit, wire bf16, min size 0"
    assert steps.row_name(Loopback(4), None, {}) == "4 processes, loopback"


def test_loopback_has_no_limit():
    with pytest.raises(ValueError, match="mbit must be None, got 100. Use Links, as root"):
        Loopback(2).limit(100)


@pytest.mark.exhaustive  # .ci/run runs the toy size, too
def test_two_processes_take_steps_on_loopback(tmp_path):
    out = ("--out", str(tmp_path / "network.json"))
    said = run_python("-m", "benchmarks.network.steps", "--toy", "--methods", "dense,dgc", *out)
    assert "On loopback, without any limit: asked for." in said
    report = json.loads((tmp_path / "network.json").read_text())
    (name, row), *others = report["runs"].items()
    assert name == "2 processes, loopback" and row["loopback"] and not others
    # A ring of two: each sends as many floats as there are; DGC's prediction is well below.
    assert row["dense"]["bytes_predicted"] == 4 * report["parameters"]
    assert 0 < row["dgc"]["bytes_predicted"] < row["dense"]["bytes_predicted"] / 3
    assert not {"ddp", "powersgd", "handing_over"} & set(row)


@pytest.mark.exhaustive
def test_pytorch_takes_turns_on_loopback(tmp_path):
    pytest.importorskip("torch")
    # Parameters that differ between processes, of any method, would end it.
    said = run_python(
        "-m", "benchmarks.network.steps", "--toy", "--out", str(tmp_path / "network.json")
    )
    assert "Without" not in said
    report = json.loads((tmp_path / "network.json").read_text())
    (row,) = report["runs"].values()
    assert row["ddp"]["bytes_predicted"] == row["dense"]["bytes_predicted"]
    assert 0 < row["powersgd"]["bytes_predicted"] < row["ddp"]["bytes_predicted"] / 3
    assert row["handing_over"] > 0 and report["torch"]


@needs_links
def test_links_reach_each_other_and_count():
    with Links(2) as links:
        assert set(remaining()) == {f"{NAMES}{x}" for x in (0, 1, "switch")}
        links.limit(1000)
        limits = inside(links, 1, "tc", "qdisc", "show", "dev", links.interface)
        assert "tbf" in limits and "1Gbit" in limits
        host = socket.gethostname()
        assert inside(links, 1, "getent", "hosts", host).split()[0] == links.address(1)
        links.limit(None)
        assert "tbf" not in inside(links, 1, "tc", "qdisc", "show", "dev", links.interface)
    assert not remaining()


@needs_links
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_after_an_error(error, monkeypatch):
    with pytest.raises(error), Links(1):
        assert remaining()
        raise error
    assert not remaining()
    monkeypatch.setattr(Links, "_join", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(error), Links(2):
        pass
    assert not remaining()
