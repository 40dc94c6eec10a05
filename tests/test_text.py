"""Trees and tables as text and HTML: what a REPL and a notebook show."""

import builtins
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
import rich.jupyter

import jrc
from jrc._text import Grid, brief, html_of, table_text

PARAMS = {"b": jnp.zeros(3), "w": jnp.zeros((4, 3))}
DGC = functools.partial(jrc.scale_by_dgc, sparsity=0.5, min_size=8)


def loss(params, batch, key=None):
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


@functools.cache
def report():
    return jrc.explain(loss, PARAMS, jnp.ones((2, 4)))


@functools.cache
def plan():
    return jrc.plan(loss, PARAMS, jnp.ones((2, 4)), budget=10**9, verify=False)


def test_a_tree_is_brief():
    tree = {
        "bf16": jnp.bfloat16(1.5),
        "key": jax.random.key(0),
        "np": np.float32(2.0),
        "shape": jax.ShapeDtypeStruct((), jnp.float32),
        "bool": jnp.bool_(True),
        "text": "x" * 99,
    }
    assert brief(tree) == (
        "{'bf16': 1.5, 'key': key<fry>[], 'np': 2, 'shape': float32[], 'bool': True, "
        "'text': 'xxxxxxxxxxxx...xxxxxxxxxxxxx'}"
    )
    layers = {f"layer_{i}": {"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)} for i in range(100)}
    assert brief(layers).startswith("{'layer_0': dict of 2 arrays, 80 B, 'layer_1': ")
    assert brief(layers).endswith("'layer_7': dict of 2 arrays, 80 B, … 92 more}")
    assert (brief((1,)), brief([]), brief(())) == ("(1,)", "[]", "()")
    traced = []
    jax.jit(lambda x: traced.append(brief((x, 1))))(1.0)
    assert traced == ["(float32[], 1)"]


@pytest.mark.parametrize("tx", [optax.adamw(0.1), DGC()], ids=["adamw", "dgc"])
def test_a_state_prints_shapes_and_no_contents(tx):
    params = {f"layer_{i}": jnp.zeros((512, 512)) for i in range(40)}
    state = jax.eval_shape(lambda key: jrc.TrainState(0, params, None, tx.init(params), key),
                           jax.random.key(0))  # fmt: skip
    assert len(repr(state)) < 1500 and "layer_0': float32[512,512]" in repr(state)
    whole = jrc.TrainState(jnp.int32(3), PARAMS, None, tx.init(PARAMS), jax.random.key(0))
    lines = repr(whole).splitlines()
    assert lines[:3] == [
        "TrainState(",
        "  step=3,",
        "  params={'b': float32[3], 'w': float32[4,3]},",
    ]
    assert lines[-2:] == ["  key=key<fry>[],", ")"]


def test_the_states_of_transforms_and_reports_of_steps_print_briefly():
    own = DGC().init(PARAMS)
    assert repr(own).startswith("DGCState(step=0, u={'b': MaskedNode(), 'w': float32[1,4,3]}, v=")
    assert repr(jrc.scale_by_ef21(min_size=8).init(PARAMS)).startswith("EF21State(step=0, u=")
    assert repr(jrc.dgc_stats(own)).startswith("DGCStats(density=0, bytes_sent=0, ")
    zero = jnp.float32(0.25)
    info = jrc.StepInfo(zero, None, *[zero] * 8, jnp.int32(0))
    assert repr(info).startswith("StepInfo(loss=0.25, aux=None, grad_norm=0.25, density=0.25, ")
    assert repr(info).endswith("losses=0.25, left_out=0)")
    outer = jrc.SparseLoCo()
    state = jrc.init_state(PARAMS, optax.sgd(0.1), jax.random.key(0), outer=outer)
    assert "OuterState(rounds=0, shared=None, report=RoundReport(loss=nan" in repr(state)
    assert "Array(" not in repr(state) + repr(state.opt_state)


def test_a_transform_prints_as_its_call():
    assert repr(jrc.scale_by_dgc().update) == "jrc.scale_by_dgc()"
    text = "jrc.dgc_momentum(learning_rate=0.1, momentum=0.9, rampup_begin_step=0, axis_name='d')"
    assert repr(jrc.dgc_momentum(0.1, 0.9, 0, axis_name="d").update) == text
    assert f", update={text})" in repr(jrc.dgc_momentum(0.1, 0.9, 0, axis_name="d"))


def test_tables_in_a_notebook():
    table = Grid(("name", "", "bytes"), [("<a & b>", "", "1 B")])
    left, right = 'style="text-align: left"', 'style="text-align: right"'
    assert html_of(["<x>", table]) == (
        f"<div>&lt;x&gt;</div><table><tr><th {left}>name</th><th {left}></th>"
        f"<th {right}>bytes</th></tr><tr><td {left}>&lt;a &amp; b&gt;</td><td {left}></td>"
        f"<td {right}>1 B</td></tr></table>"
    )
    cut = jrc.find_segments(lambda x: jrc.mark(jnp.sin(x), "a") * 2, ["a"], jnp.ones(3))
    for shown in (report(), plan(), cut):
        html = shown._repr_html_()
        assert html.count("<table>") >= 1 and "─" not in html
        assert str(shown).split("\n")[0].split(" = ")[0] in html or shown is cut
    none = jrc.LargestBatch(0, 0, None, 8)
    assert none._repr_html_() == f"<div>{none}</div>"
    found = jrc.LargestBatch(1, 2, plan(), 8)
    assert found._repr_html_().startswith("<div>1 fit without a plan, 2 with this one:<")
    assert found._repr_html_().endswith(plan()._repr_html_())


def test_a_report_shows_its_live_bytes_where_matplotlib_is_there(monkeypatch):
    html = report()._repr_html_()
    assert html.endswith('">') and '<img alt="live bytes' in html and "png;base64,iVBOR" in html
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert report()._repr_html_() == html[: html.index("<img")]


def test_a_table_as_text_displays_nothing_in_a_notebook(monkeypatch):
    def display(*args):
        raise AssertionError("rich displayed something")

    advice = jrc.dgc_advice(PARAMS, replicas=4, bandwidth="1Gbit/s", step_time=0.1)
    texts = table_text(("a", "b"), [("1", "2")]), str(advice)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(rich.jupyter, "display", display)
    assert (table_text(("a", "b"), [("1", "2")]), str(advice)) == texts


def test_a_table_fits_a_terminal():
    """Empty columns are left out; what is too wide is broken, and numbers are whole."""
    heads = ("value", "made at", "mark", "each one", "bytes")
    short = table_text(heads, [("a", "net.py:1", "", "1 KiB", "2 KiB")]).splitlines()
    assert short[0] == "  value   made at    each one   bytes" and "mark" not in short[0]
    wide = [("12 x " + "name " * 20, "net.py:1", "", f"{n},000.00 KiB", "2 KiB") for n in (1, 2)]
    lines = table_text(heads, wide).splitlines()
    assert max(map(len, lines)) == 80 and len(lines) > 4
    assert lines[0].split() == ["value", "made", "at", "each", "one", "bytes"]
    text = "\n".join(lines)
    assert text.count("name") == 40 and "1,000.00 KiB  2 KiB" in text and "…" not in text
    # A head is broken where its numbers are narrower, and a name without a blank anywhere.
    lines = table_text(("", *["a long head"] * 9), [("x" * 90, "b", *["1"] * 8)]).splitlines()
    assert max(map(len, lines)) <= 80 and "".join(lines).count("x") == 90
    # Numbers that need more than a terminal has are not cut.
    lines = table_text(("", "", *"abcdefgh"), [("name", "of", *["1,000,000 KiB"] * 8)]).splitlines()
    assert lines[-1].count("1,000,000 KiB") == 8


def test_lists_of_targets_fit_a_terminal():
    shown = [jrc.targets(), *map(jrc.target, ("v5e", "h100:8x2", "gb200", "tpu7x"))]
    assert max(len(line) for each in shown for line in str(each).splitlines()) <= 80
    heads = str(jrc.targets()).splitlines()[1].split()
    assert heads == ["name", "one", "device", "memory", "TFLOP/s", "bandwidth", "host", "links"]


def test_names_are_shown_as_they_are():
    """No markup of rich, no emoji, no formula of matplotlib, and in the legend."""
    names = ("blk[a]", "a[/b]", "h:fire:0", r"$\frac0$")

    def _loss(params, batch):
        for name in names:
            batch = jrc.mark(jnp.tanh(batch @ params), name)
        return jnp.mean(batch)

    found = jrc.explain(_loss, jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert all(name in str(found) for name in names[:3])  # the last result is not saved
    for name in names:
        assert table_text(("a", "b"), [(name, name)]).count(name) == 2
    assert "<img" in found._repr_html_()
    assert "[/new]" in found.compare(found, names=("[old]", "[/new]"))
