"""The report as a value, as text, as JSON and as a figure."""

import builtins
import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jrc
from jrc._text import flops_text, memory_text
from jrc.remat import plan_for_each
from jrc.remat._report.plot import backward_start, curve_of
from tests.remat.changed_json import changed_texts

S = jax.ShapeDtypeStruct((64, 64), jnp.float32)
X = jax.ShapeDtypeStruct((128, 64), jnp.float32)
NAMES = [f"layer_{i}" for i in range(6)]


def loss(ws, x):
    for name, w in zip(NAMES, ws, strict=True):
        x = jrc.mark(jnp.sin(jnp.sin(x @ w) @ w), name)
    return jnp.sum(x)


@functools.cache
def report(rerun=False):
    fn = jrc.recompute_segments(loss, NAMES) if rerun else loss
    return jrc.explain(fn, [S] * 6, X)


@pytest.mark.parametrize("rerun", [False, True])
def test_json_gives_the_same_report(rerun):
    text = report(rerun).to_json()
    assert jrc.Report.from_json(text) == report(rerun)
    assert str(jrc.Report.from_json(text)) == str(report(rerun))
    assert json.loads(text)["format"] == "jrc.Report/6"


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}'])
def test_other_json_is_refused(text):
    with pytest.raises(
        ValueError, match="jrc.Report.from_json: text must be what Report.to_json writes, of "
    ):
        jrc.Report.from_json(text)


def test_a_report_that_was_changed_is_refused():
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, PartitionSpec("data")))
    fn = jrc.recompute_segments(loss, NAMES)
    for text in changed_texts(jrc.explain(fn, [S] * 6, x).to_json()):
        with pytest.raises(ValueError, match="jrc.Report.from_json: text must be what Report.to_"):
            jrc.Report.from_json(text)


def test_totals():
    plain, recomputed = report(), report(rerun=True)
    value = 128 * 64 * 4
    assert plain.saved_bytes == sum(plain.by_line.values()) == (6 * 4 - 1) * value
    assert plain.by_mark == {name: value for name in NAMES[:5]}
    assert recomputed.saved_bytes == sum(recomputed.by_mark.values()) == 5 * value
    assert recomputed.rerun_flops == sum(each.flops for each in recomputed.rerun) > 0
    assert plain.rerun == () and recomputed.flops == plain.flops + recomputed.rerun_flops


def test_the_table():
    lines = str(report()).splitlines()
    assert lines[0].startswith("gradient of `loss` on ")
    memory = report().memory
    assert lines[1] == (
        f"peak {memory_text(memory.peak)} = arguments {memory_text(memory.arguments)} + outputs "
        f"{memory_text(memory.outputs)} + temporaries {memory_text(memory.temporaries)}"
    )
    assert lines[2].startswith("saved for the backward pass 736 KiB, run again 0 FLOP of ")
    assert lines[3].startswith("time ") and lines[3].endswith(" (modelled)")
    # Equal values of the layers are one row, the largest first; types are broken off for the width.
    line = f"test_explain_report.py:{loss.__code__.co_firstlineno + 2}"
    rows = [" ".join(two).split() for two in zip(lines[6:12:2], lines[7:12:2], strict=True)]
    assert rows[0] == f"12 x cos {line} 32 KiB 384 KiB 52.2 % f32[128,64]".split()
    assert rows[1] == f"6 x sin {line} 32 KiB 192 KiB 26.1 % f32[128,64]".split()
    marked = f"5 x sin {line} layer_0 … 32 KiB 160 KiB 21.7 % f32[128,64] layer_4"
    assert rows[2] == marked.split()
    assert lines[-4:-2] == ["saved marks: layer_0 … layer_4 160 KiB", "nothing is run again"]
    assert lines[-2].startswith("what helps: values are saved for the backward pass: jrc.plan(fn, ")
    assert max(map(len, lines[3:])) <= 80


def test_the_table_of_recomputed_operators():
    lines = str(report(rerun=True)).splitlines()
    (head,) = (i for i, line in enumerate(lines) if "of all FLOPs" in line)
    assert lines[head + 2].split()[:3] == ["dot_general", "12", "x"]
    assert any(line.startswith("warning: region 5 of 6 (from 0) in `loss`") for line in lines)
    assert max(map(len, lines[3:])) <= 80


def test_many_rows_are_summed():
    first = report().saved[0]
    many = tuple(
        dataclasses.replace(first, bytes=1000 * (40 - i), mark=None, place=f"net.py:{i}")
        for i in range(40)
    )
    text = str(dataclasses.replace(report(), saved=many))
    assert "26 smaller values" in text and memory_text(sum(1000 * (26 - i) for i in range(26))) in (
        text
    )
    loops = dataclasses.replace(first, bytes=4000, times=5, memory="pinned_host", mark="h")
    text = str(dataclasses.replace(report(), saved=(loops, loops)))
    assert "2 x 5 steps x" in text and "in pinned_host" in text
    assert "saved for the backward pass 0 B and 7.812 KiB in pinned_host" in text
    assert "nothing is saved besides" in str(dataclasses.replace(report(), saved=()))


def test_two_reports_side_by_side():
    plain, recomputed = report(), report(rerun=True)
    text = plain.compare(recomputed, names=("plain", "lean"))
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["plain", "lean", "change", "ratio"]
    saved = next(line for line in lines if line[0] == "saved" and line[1] != "at")
    assert saved == "saved 736 KiB 160 KiB -576 KiB 0.217".split()
    peak = next(line for line in lines if line[0] == "peak")
    assert peak[1:5] == [*memory_text(plain.memory.peak).split(),
                         *memory_text(recomputed.memory.peak).split()]  # fmt: skip
    assert any(line[0].startswith("test_explain_report.py:") for line in lines)
    assert "saved at" not in plain.compare(plain)
    with pytest.raises(
        TypeError, match="names must be a list of strings, one for each .*, got 'ab'"
    ):
        plain.compare(recomputed, names="ab")


@pytest.mark.parametrize(
    "n, text", [(0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (3 * 2**30, "3 GiB")]
)
def test_bytes_as_text(n, text):
    assert memory_text(n) == text


def test_flops_as_text():
    assert [flops_text(n) for n in (999, 10**9, 2.5e15)] == ["999 FLOP", "1 GFLOP", "2.5 PFLOP"]


def test_the_backward_pass_begins_where_the_fewest_instructions_are_misplaced():
    phases = ["forward", "backward", "forward", "forward", "backward", "forward", "backward"]
    assert backward_start(phases) == 4
    assert backward_start(["backward"] * 3) == 0 and backward_start(["forward"] * 3) == 3


def test_the_points_of_a_curve():
    curve = curve_of(report())
    live = report().live
    assert curve.y == tuple(point.bytes / 2**20 for point in live)
    assert 0 < curve.x[0] < 1 < curve.x[-1] < 2 and list(curve.x) == sorted(curve.x)
    assert [name for *_, name in curve.marks] == NAMES
    assert all(x < 1 for x, *_ in curve.marks)
    assert curve.peak[1] == max(point.bytes for point in live) / 2**20


def test_a_figure(tmp_path):
    read = jrc.Report.from_json(report().to_json())
    read.plot(tmp_path / "two.png", report(rerun=True), names=("plain", "lean"))
    read.plot(tmp_path / "one.svg")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "one.svg").read_text()
    assert "<svg" in drawn and "backward pass" in drawn and "layer_0" in drawn
    with pytest.raises(
        ValueError, match="names must be one for each of the 1 reports, got .'a', 'b'."
    ):
        read.plot(tmp_path / "no.png", names=("a", "b"))


def test_the_figure_of_a_function_as_it_is(tmp_path):
    found = jrc.explain(jax.jit(lambda x: jnp.sort(x @ x.T) @ x), X, argnums=None)
    curve = curve_of(found)
    assert curve.peak[1] > 0 and 0 < curve.x[0] < 1 < curve.x[-1] < 2
    found.plot(tmp_path / "one.svg")
    drawn = (tmp_path / "one.svg").read_text()
    assert "in the order in which it runs" in drawn and "backward pass" not in drawn
    found.plot(tmp_path / "two.svg", report())
    assert "backward pass" in (tmp_path / "two.svg").read_text()


def test_figures_that_cannot_be_written(tmp_path):
    (tmp_path / "folder.png").mkdir()
    wrong = {
        "none": (
            ValueError,
            r"path must end in a format, one of .*\.png, .*, got '.*none'",
        ),
        "a.hat": (ValueError, r"got '.*a\.hat'"),
        "no/a.png": (FileNotFoundError, "in a folder that exists, got '.*a.png'. Make '.*no'"),
        "folder.png": (IsADirectoryError, "path must be a file, got the folder"),
    }
    for path, (kind, text) in wrong.items():
        with pytest.raises(kind, match=f"jrc.Report.plot: .*{text}"):
            report().plot(tmp_path / path)
    with pytest.raises(TypeError, match="path must be text or a pathlib.Path, got int"):
        report().plot(3)
    with pytest.raises(TypeError, match="every other report must be a jrc.Report, got str"):
        report().plot(tmp_path / "a.png", "other")
    assert [each.name for each in tmp_path.iterdir()] == ["folder.png"]


def test_without_matplotlib(tmp_path, monkeypatch):
    found = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"matplotlib must be installed. Run pip install"):
        report().plot(tmp_path / "no.png")


def remedies(**changes):
    return [str(each) for each in dataclasses.replace(report(), **changes).remedies]


def test_remedies():
    """Each where it is about much of the peak; what is about the most bytes comes first."""
    first, memory = report().saved[0], report().memory
    peak = memory.peak
    assert any("jrc.plan(fn" in each for each in remedies())
    (only,) = remedies(saved=())
    assert only.startswith("few of the temporaries are values that are saved")
    little = dataclasses.replace(memory, temporaries=peak // 16)
    assert not any("few of" in each for each in remedies(saved=(), memory=little))
    few = dataclasses.replace(memory, arguments=9 * peak, temporaries=peak)
    assert "arguments and results are there whatever" in remedies(memory=few)[0]
    wide = dataclasses.replace(first, bytes=peak // 2, times=1, shape=(8, 512), place="a.py:3")
    assert any(
        "float32[8,512] at a.py:3, can be made in" in each for each in remedies(saved=(wide,))
    )
    cast = dataclasses.replace(wide, primitive="convert_element_type", bytes=peak // 5)
    assert any(
        "cast to float32 and saved, most at a.py:3" in each for each in remedies(saved=(cast,))
    )
    whole = remedies(saved=(wide,), is_gradient=False, donatable=peak // 2, constants=peak)
    assert len(whole) == 4 and "donate_argnums" in "".join(whole) and "closes over" in whole[-1]
    most = dataclasses.replace(memory, temporaries=8 * peak)
    step = remedies(saved=(), is_gradient=False, memory=most, donatable=peak)
    assert " are temporaries of a train step, and a plan of its loss leaves out some: " in step[0]
    assert not remedies(saved=(), is_gradient=False, memory=most)  # none of a step


def test_a_function_as_it_is():
    def step(state, x):
        return [w - jnp.mean(x @ w) for w in state], jnp.sum(x)

    state, x = [jnp.full((64, 64), k) for k in (1.0, 2.0, 3.0, 4.0)], jnp.ones((8, 64))
    plain = jrc.explain(step, state, x, argnums=None)
    lean = jrc.explain(jax.jit(step, donate_argnums=0), state, x, argnums=None)
    size = 4 * 64 * 64 * 4
    assert (plain.donatable, lean.donatable, lean.memory.aliased) == (size, 0, size)
    assert plain.saved[0].shape == (64, 64) and plain.saved[0].times >= 4
    assert (plain.argnums, report().argnums) == ((), (0,))
    assert "largest values of the program" in str(plain) and "backward" not in str(plain)
    assert jrc.Report.from_json(lean.to_json()) == lean
    assert lean.flops == plain.flops > 4 * 2 * 8 * 64 * 64
    text = plain.compare(lean)
    assert "aliased" in text and "run again" not in text


def test_what_a_function_closes_over():
    table = jnp.ones((256, 64))
    found = jrc.explain(lambda w, i: jnp.sum(table[i] * w), jnp.ones((1, 64)), jnp.arange(4))
    assert found.constants == 256 * 64 * 4
    assert found.remedies[-1].kind == "constants"
    assert "closes over 64 KiB of arrays" in str(found.remedies[-1])


@pytest.mark.slow
def test_remedies_are_compiled():
    """Their bytes are those of the plan that they name, and none is beaten by another."""

    def short(w, x):
        for _ in range(3):
            x = jnp.sin(jnp.sin(x @ w))
        return jnp.sum(x)

    tried = jrc.explain(short, S, X, try_remedies=True)
    plans = [each for each in tried.remedies if each.kind == "plan"]
    assert plans and all(each.is_compiled for each in plans)
    budgets = [int(re.search(r"budget=(\d+)", each.text)[1]) for each in plans]
    again = plan_for_each(short, S, X, budgets=budgets)
    for each, plan in zip(plans, again, strict=True):
        assert plan.verified.peak_bytes == each.peak_bytes == tried.memory.peak - each.bytes > 0
        assert str(each) in " ".join(str(tried).split())
    assert "jrc.plan(fn, *args, budget='60%')" not in str(tried)
    ordered = sorted(plans, key=lambda each: each.seconds_ratio)
    assert plans == ordered == sorted(plans, key=lambda each: each.bytes)
    assert jrc.Report.from_json(tried.to_json()) == tried
    assert dataclasses.replace(tried, tried=()) == jrc.explain(short, S, X)


def test_donated_arguments_are_compiled():
    """Arguments are named by position, among static ones and those that are donated already."""

    def step(mode, state, x, moments):
        moved = [0.9 * m + jnp.tanh(x.T @ x) for m in moments]
        return [w + m for w, m in zip(state, moved, strict=True)], moved

    args = ("train", [S] * 4, X, [S] * 4)
    for fn in (step, jax.jit(step, static_argnums=0, donate_argnums=1)):
        first = jrc.explain(fn, *args, argnums=None)
        assert first.donatable_argnums == (1, 3)
        tried = jrc.explain(fn, *args, argnums=None, try_remedies=True)
        donated = next(each for each in tried.remedies if each.kind == "donate")
        assert donated.is_compiled and "donate_argnums=(1, 3)" in str(donated)
        assert donated.peak_bytes < first.memory.peak == donated.peak_before
        assert sum(each.kind == "donate" for each in tried.remedies) == 1
    both = jax.jit(step, static_argnums=0, donate_argnums=(1, 3))
    best = jrc.explain(both, *args, argnums=None)
    assert best.donatable == 0 and best.donatable_argnums == ()
