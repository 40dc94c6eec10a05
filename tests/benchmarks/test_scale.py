"""The benchmark of one device: its GPT is the library's, its policies save what they name."""

import functools

import jax
import pytest

from benchmarks._lib.gradient import saved_bytes
from benchmarks._models.model import drawn
from benchmarks.memory import _scale_policies, scale
from benchmarks.memory._scale_measure import Model, runs
from jrc.models import gpt
from tests.remat.measure import bit_equal

CONFIG = gpt.Config(32, layers=2, heads=2, width=16, length=8, scan=True)
MODEL = Model(CONFIG, "float32")
SHAPES = MODEL.args(2, CONFIG.length)


@functools.cache
def saved(way):
    return saved_bytes(functools.partial(MODEL.loss, policy=way), SHAPES, False)


@pytest.mark.slow
def test_the_named_model_is_the_librarys():
    args = drawn(SHAPES)
    ours = jax.jit(functools.partial(gpt.loss, config=CONFIG))(*args)
    assert bit_equal(jax.jit(MODEL.loss)(*args), ours)


# The others take half a minute together.
QUICK = (_scale_policies.FULL, "save_dot_except_mlp")
WAYS = [
    w if w in QUICK else pytest.param(w, marks=pytest.mark.exhaustive)
    for w in _scale_policies.POLICIES
]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_the_plain_gradients(way):
    args = drawn(SHAPES)
    plain, lean = (
        jax.jit(jax.grad(functools.partial(MODEL.loss, policy=name)))(*args)
        for name in (_scale_policies.PLAIN, way)
    )
    assert bit_equal(plain, lean)


def test_policies_save_the_values_that_they_name():
    tokens = 4 * 2 * CONFIG.layers * CONFIG.length * CONFIG.width  # float32
    sizes = {"qkv_proj": 3, "context": 1, "out_proj": 1, "mlpwi": 4, "mlpwo": 1}
    least = saved(_scale_policies.FULL)
    for way, kept in _scale_policies.SAVED.items():
        # A block's own backward pass does not read what it adds last.
        wanted = tokens * sum(sizes[name] for name in kept if name != "mlpwo")
        assert saved(way) - least == wanted, way
    assert least < min(saved(way) for way in _scale_policies.SAVED)
    assert (
        max(map(saved, _scale_policies.SAVED))
        < saved("dots_saveable")
        < saved(_scale_policies.PLAIN)
    )


@pytest.mark.exhaustive
def test_sizes_and_speeds_of_a_toy(tmp_path):
    report = scale.main(["--toy", "--platform", "cpu", "--out", str(tmp_path / "scale.json")])
    for found in (report["sizes"]["batch"], report["sizes"]["sequence"]):
        assert 0 < found["plain"] < found["planned"] and found["flops"] > 1.0
        assert found["peak"] <= report["sizes"]["memory"]
        assert found["ran"] == {"plain": True, "plain, one more": True, "planned": True}
    for row in report["speed"]["rows"].values():
        assert row["plan"]["peak"] <= row["peak"] and row["plan"]["flops"] <= row["flops"]
        assert set(row["seconds"]) == {"theirs", "plan", "plain"}
    assert len(scale.speed_table("", report["speed"]).rows) == len(scale.TOY["policies"])


def test_the_table_shows_what_does_not_fit():
    found = {"batch": 2, "length": 10, "dtype": "float32", "device": "cpu", "jax": "0.12"}
    found["laps"] = (1, 3)
    lean = {"full": {"peak": 3 * 2**20, "flops": 1.3}}
    (row,) = scale.speed_table("GPT", found | {"rows": lean}).rows
    assert row == ("full", "3 MiB, not run", "1.300", "-", "-", "-", "-", "-")
    seconds = {"theirs": [2.0, 2.0, 2.0], "plan": [1.0, 1.0, 4.0]}
    at = {"peak": 2**20, "flops": 1.3, "seconds": seconds, "plan": {"flops": 1.1}}
    (row,) = scale.speed_table("GPT", found | {"rows": {"full": at}}).rows
    assert row[3] == "10 (10–10)" and row[5:] == ("20 (8–20)", "2.000", "-")


@pytest.mark.slow
def test_a_gradient_that_runs_out_of_memory_is_reported(monkeypatch):
    def refuses(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    make = lambda size: MODEL.args(size, CONFIG.length)  # noqa: E731
    assert runs(MODEL.loss, make, 1) is True
    assert runs(MODEL.loss, make, 0) is None
    monkeypatch.setattr(jax, "jit", lambda fn: refuses)
    assert runs(MODEL.loss, make, 1) is False
