"""The compression benchmark: bytes read from a program, magnitudes, and sections of a report."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks._lib import report as report_files
from benchmarks.dgc import _bytes, _selectors, costs
from benchmarks.dgc._bytes import Collective, collectives, step_of
from benchmarks.dgc._steps import AXIS, abstract_mesh
from benchmarks.readme._parts import PARTS

LIKE = {"w": jax.ShapeDtypeStruct((400, 300), jnp.float32), "b": jax.ShapeDtypeStruct((40,), "f4")}
# 120 of w, and at least one of b.
SENT = 120


def lowered(fn, x):
    over = jax.shard_map(fn, mesh=abstract_mesh(4), in_specs=P(AXIS), out_specs=P(AXIS))
    return jax.jit(over).trace(x).lower(lowering_platforms=("cpu",)).as_text()


def test_collectives_of_a_program_with_their_bytes():
    def fn(x):
        rows = lax.all_to_all(x.reshape(4, 6), AXIS, 0, 0)
        total, flag = lax.psum((rows, jnp.int32(1) + lax.axis_index(AXIS)), AXIS)
        halves = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
        gathered = lax.all_gather(halves, AXIS).sum().astype(jnp.float32)
        return x + total.reshape(-1) + flag + gathered

    found = collectives(lowered(fn, jax.ShapeDtypeStruct((96,), jnp.float32)))
    sums = [each for each in found if each.kind == "all_reduce"]
    assert sum(each.nbytes for each in sums) == 24 * 4 + 4
    others = [each for each in found if each.kind != "all_reduce"]
    assert others == [Collective("all_to_all", 24 * 4), Collective("all_gather", 24 * 2)]


def test_bytes_of_ring_algorithms():
    kinds = ("all_gather", "all_to_all", "all_reduce")
    assert [Collective(kind, 80).sent(4) for kind in kinds] == [240, 60, 120]
    with pytest.raises(ValueError, match=r"a step must have no reduce_scatter, got one in"):
        Collective("reduce_scatter", 80).sent(4)


def test_a_step_sends_the_bytes_that_jrc_predicts():
    step = step_of(LIKE, 8, exchange="allgather")
    assert step.payload() == 8 * SENT + 4 * 40
    assert step.sent == 7 * 8 * SENT + 2 * 7 / 8 * 4 * 40
    assert step.dense == 2 * 7 / 8 * 4 * (120_000 + 40)
    every = step_of(LIKE, 8, wire="bf16", min_size=0, exchange="allgather")
    # One entry of b more, and a word for each of the three blocks.
    assert [each.nbytes for each in every.collectives] == [4 * (SENT + 1 + 3)]


def test_a_wrong_prediction_is_refused(monkeypatch):
    monkeypatch.setattr(_bytes, "reported", lambda traced: (5.0, 10.0))
    with pytest.raises(RuntimeError, match=r"on 8 replicas: jrc predicts 5 bytes, the program"):
        step_of(LIKE, 8, exchange="allgather")


def test_auto_changes_where_the_bytes_cross():
    rows = {"allgather, f32": {"sent": {"2": 960.0}}, "sharded, f32": {"sent": {"2": 970.0}}}
    like = {"w": LIKE["w"]}
    found = _bytes.crossover(like, "f32", rows, (2,), lambda _: None)
    assert found == {"dense": 1000, "sharded": None}
    rows["allgather, f32"]["sent"]["2"] = 9600.0
    with pytest.raises(RuntimeError, match=r"takes \['gather', 'gather'\] on 99 and 100 replicas"):
        _bytes.crossover(like, "f32", rows, (2,), lambda _: None)


@pytest.mark.slow
def test_magnitudes_relative_to_the_exact_choice():
    leaves = _selectors.drawn("normal", [100_000, 20_000])
    found = _selectors.masses(leaves)
    flat = [np.sort(np.abs(np.asarray(leaf)))[::-1] for leaf in leaves]
    exact = flat[0][:100].sum() + flat[1][:20].sum()
    together = np.sort(np.concatenate(flat))[::-1][:120].sum()
    assert found["exact"] == 1.0
    assert found["global"] == pytest.approx(together / exact, rel=1e-5)
    assert all(0.5 < found[name] <= 1.0 for name in ("two_stage", "blocked", "sampled"))


def test_quartiles_and_ratios_of_rounds():
    seconds = {"pass": [1.0, 2.0, 4.0], "other": [3.0, 4.0, 4.0]}
    found = _selectors.compared(seconds, "pass")
    assert found["pass"] == {"seconds": [1.5, 2.0, 3.0], "ratio": [1.0, 1.0, 1.0]}
    assert found["other"]["ratio"] == [1.5, 2.0, 2.5]


@pytest.mark.exhaustive
def test_sections_are_added_to_a_file_and_become_tables(tmp_path, monkeypatch):
    out = tmp_path / "dgc.json"
    as_it_was = json.loads((report_files.RESULTS / "dgc.json").read_text())["compile"]
    out.write_text(json.dumps({"toy": True, "compile": as_it_was}))
    costs.main(["--toy", "--only", "replicas", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["compile"] == as_it_was
    assert report["replicas"]["jax"] == jax.__version__
    assert report["replicas"]["crossover"]["f32"]["dense"] > 100
    out.write_text(json.dumps({"toy": True, "replicas": report["replicas"]}))
    monkeypatch.setattr(report_files, "RESULTS", out.parent)
    text = PARTS["dgc"]()
    assert "| auto, blocked, f32 |" in text and "|  | N = 2 | N = 4 |" in text


def test_figures_of_two_sizes_do_not_mix(tmp_path):
    out = tmp_path / "dgc.json"
    out.write_text(json.dumps({"toy": False}))
    with pytest.raises(SystemExit, match="must name a file of toy figures, got .* with full ones"):
        costs.main(["--toy", "--only", "replicas", "--out", str(out)])


def test_an_unknown_section_is_refused(capsys):
    with pytest.raises(SystemExit):
        costs.main(["--only", "payload,nothing"])
    error = capsys.readouterr().err
    assert "must be some of payload, replicas, selectors, compile, got nothing" in error
