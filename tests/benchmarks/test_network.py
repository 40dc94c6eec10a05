"""The network benchmark: what it counts, how it names and limits, and that it leaves nothing."""

import json
import os
import pathlib
import socket
import subprocess

import network
import network_links
import pytest
from network_links import Links, Loopback, counters, limit_command

from tests.examples.runs import run

NAMES = f"jrc-{os.getpid()}-"
needs_links = pytest.mark.skipif(
    bool(reason := network_links.why_not()), reason=f"no slow links: {reason}"
)


def left_behind():
    places = [pathlib.Path("/run/netns"), network_links.HOSTS]
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
    assert network.sent_a_step(before, after, 4) == (200 + 600) / 2 / 4
    assert network.sent_a_step([None, None], [None, None], 4) is None


def test_medians_and_ratios_are_side_by_side():
    found = {
        "dense": {"blocks": [[4.0, 6.0], [9.0, 9.0]], "sent": [100.0, 120.0]},
        "dgc": {"blocks": [[1.0, 1.0], [1.0, 5.0]], "sent": [None, None]},
    }
    row = network.summary(found, {"dense": 90.0, "dgc": 2.0})
    assert row["dense"]["seconds"] == 7.5 and row["dense"]["least"] == 4.0
    assert row["dgc"]["seconds"] == 1.0 and row["ratio"] == 7.5
    assert row["ratios"] == [3.0, 5.0]
    assert (row["dense"]["bytes_sent"], row["dgc"]["bytes_sent"]) == (110.0, None)


def test_rows_say_what_is_not_the_default():
    links = Links(2)
    assert network.row_name(links, 1000, {}) == "2 processes, 1 Gbit/s"
    said = network.row_name(links, None, {"wire": "bf16", "min_size": 0})
    assert said == "2 processes, no limit, wire bf16, min size 0"
    assert network.row_name(Loopback(4), None, {}) == "4 processes, loopback"


def test_loopback_has_no_limit():
    with pytest.raises(ValueError, match="has no limit; got 100 Mbit/s. Use Links, as root."):
        Loopback(2).limit(100)


@pytest.mark.slow  # .ci/run runs the toy size, too
def test_two_processes_take_steps_on_loopback(tmp_path):
    said = run("../benchmarks/network", "--toy", "--out", str(tmp_path / "network.json"))
    assert "On loopback, without any limit: asked for." in said
    report = json.loads((tmp_path / "network.json").read_text())
    (name, row), *others = report["runs"].items()
    assert name == "2 processes, loopback" and row["loopback"] and not others
    # A ring of two: each sends as many floats as there are; DGC's prediction is well below.
    assert row["dense"]["bytes_predicted"] == 4 * report["parameters"]
    assert 0 < row["dgc"]["bytes_predicted"] < row["dense"]["bytes_predicted"] / 3


@needs_links
def test_links_reach_each_other_and_count():
    with Links(2) as links:
        assert set(left_behind()) == {f"{NAMES}{x}" for x in (0, 1, "switch")}
        links.limit(1000)
        limits = inside(links, 1, "tc", "qdisc", "show", "dev", links.interface)
        assert "tbf" in limits and "1Gbit" in limits
        host = socket.gethostname()
        assert inside(links, 1, "getent", "hosts", host).split()[0] == links.address(1)
        links.limit(None)
        assert "tbf" not in inside(links, 1, "tc", "qdisc", "show", "dev", links.interface)
    assert not left_behind()


@needs_links
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_after_an_error(error, monkeypatch):
    with pytest.raises(error), Links(1):
        assert left_behind()
        raise error
    assert not left_behind()
    monkeypatch.setattr(Links, "_join", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(error), Links(2):
        pass
    assert not left_behind()
