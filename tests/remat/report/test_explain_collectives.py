"""`jrc.explain` on a mesh: every collective of the compiled gradient, and which are re-run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc._text import exchange_text
from jrc.remat._compiled.collectives import Collective, collectives
from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._compiled.replica_groups import axes_of_groups, groups_of
from tests.compiled_texts import compiled_text

W, X = jnp.full((8, 8), 0.1), jnp.ones((4, 8))
LAYERS, WIDTH = 3, 64


def block(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def loss(fn, params, x):
    for p in params:
        x = fn(x, p)
    return jnp.mean(x**2)


def scanned(fn, params, x):
    return jnp.mean(jax.lax.scan(lambda x, p: (fn(x, p), None), x, params)[0] ** 2)


def marked(params, x):
    for i, p in enumerate(params):
        x = jrc.mark(block(x, p), f"block_{i}")
    return jnp.mean(x**2)


def arguments(sizes=(8,), stacked=False, batch=512):
    names = ("fsdp", "model")[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    model = "model" if len(sizes) > 1 else None

    def shape(*size, spec):
        if stacked:
            size, spec = (LAYERS, *size), P(None, *spec)
        return jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, spec))

    layer = {
        "up": shape(WIDTH, 4 * WIDTH, spec=P("fsdp", model)),
        "down": shape(4 * WIDTH, WIDTH, spec=P(model, "fsdp")),
    }
    rows = NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32, sharding=rows)
    return (layer if stacked else [layer] * LAYERS), x


def gathers(report):
    """Of each type of parameter: how often gathered, in the backward pass, and re-run."""
    return {
        each.arrays[0]: (each.axes, each.count, each.backward, each.rerun)
        for each in report.collectives
        if each.kind == "all-gather"
    }


BUILDS = {
    "plain": (functools.partial(loss, block), 0),
    "checkpoint": (functools.partial(loss, jax.checkpoint(block)), 3),
    "recompute": (functools.partial(loss, functools.partial(jrc.recompute, block)), 3),
    "segments": (jrc.recompute_segments(marked, ["block_0", "block_1"]), 2),
    # Nothing keeps XLA from reading what the forward pass has gathered.
    "no barrier": (functools.partial(loss, jax.checkpoint(block, prevent_cse=False)), 0),
}


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("name", BUILDS)
def test_parameters_that_are_gathered_again_for_recomputation(name):
    fn, again = BUILDS[name]
    report = jrc.explain(fn, *arguments())
    want = ("fsdp",), LAYERS + again, again, again
    assert gathers(report) == {"f32[64,256]": want, "f32[256,64]": want}
    (reduced,) = (each for each in report.collectives if each.kind == "all-reduce")
    assert (reduced.count, reduced.rerun, len(reduced.arrays)) == (1, 0, 2 * LAYERS + 1)
    each = 4 * 4 * WIDTH * WIDTH * 7 // 8
    assert report.rerun_sent_bytes == 2 * again * each
    assert report.sent_bytes == 2 * (LAYERS + again) * each + 2 * LAYERS * 2 * each + 7
    assert jrc.Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("recomputes", [False, True])
def test_loops_count_with_their_iterations_and_axes_are_told_apart(recomputes):
    fn = jax.checkpoint(block) if recomputes else block
    report = jrc.explain(functools.partial(scanned, fn), *arguments((4, 2), stacked=True))
    # A loop gathers its parameters again in the backward pass in any case.
    want = ("fsdp",), 2 * LAYERS, LAYERS, LAYERS * recomputes
    assert gathers(report) == {"f32[64,128]": want, "f32[128,64]": want}
    (products,) = (each for each in report.collectives if each.axes == ("model",))
    assert (products.kind, products.count, products.rerun) == ("all-reduce", 2 * LAYERS, 0)
    assert (products.devices, products.arrays) == (2, ("f32[128,64]",))


def test_a_plan_under_fsdp_states_what_is_sent_again():
    params, x = arguments(batch=8192)
    fn = functools.partial(loss, block)
    plan = jrc.plan(fn, params, x, budget=0.0, compilations=1, chunks=False)
    report = jrc.explain(plan.apply(fn), params, x)
    assert plan.reruns and report.rerun_sent_bytes > 0
    assert all(c.rerun == c.backward for c in report.collectives if c.kind == "all-gather")
    (chosen,) = (each for each in plan.candidates if each.is_chosen)
    assert chosen.sent_bytes == report.sent_bytes
    assert chosen.rerun_sent_bytes == report.rerun_sent_bytes
    (plain,) = (each for each in plan.candidates if each.name == "baseline")
    assert plain.rerun_sent_bytes == 0 < plain.sent_bytes
    again = jrc.Plan.from_json(plan.to_json())
    assert again == plan and again.candidates == plan.candidates
    sent = exchange_text(report.sent_bytes, report.rerun_sent_bytes, None)
    assert sent in str(plan) and "again" in str(plan)
    at = dataclasses.replace(plan, target="v5e:2x4"), dataclasses.replace(report, device="v5e:2x4")
    for text in map(str, at):
        assert exchange_text(report.sent_bytes, report.rerun_sent_bytes, 200e9) in text


def test_a_plan_on_one_device_says_nothing_of_it():
    plan = jrc.plan(lambda w: jnp.sum(jnp.sin(w @ w)), W, budget=1.0)
    assert "sends" not in str(plan) and "sent" not in str(plan)
    assert all(each.sent_bytes is None for each in plan.candidates)


def test_collectives_of_automatic_sharding():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, P("d"))
    x, w = jax.device_put(X, rows), jax.device_put(W, jax.sharding.NamedSharding(mesh, P()))
    report = jrc.explain(lambda w, x: jnp.sum(jnp.sin(x @ w)), w, x)
    reduced = [each for each in report.collectives if each.kind == "all-reduce"]
    assert reduced and sum(each.rerun for each in reduced) == 0
    assert sum(each.bytes for each in report.collectives) >= W.nbytes


@pytest.mark.parametrize("rerun", [False, True])
def test_recomputed_collectives(rerun):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def body(w, x):
        x = jrc.mark(jnp.sin(jax.lax.psum(jnp.sin(x @ w), "d") @ w), "h")
        return jax.lax.pmean(jnp.sum(jnp.sin(x @ w)), "d")

    body = jrc.recompute_segments(body, ["h"], recompute_collectives=rerun)
    loss = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    report = jrc.explain(loss, W, X)
    assert {each.axes for each in report.collectives} == {("d",)}
    reduced = (each for each in report.collectives if each.kind == "all-reduce")
    assert sum(each.rerun for each in reduced) == int(rerun)


def test_a_table_is_short():
    report = jrc.explain(lambda w, x: jnp.sum(jnp.sin(x @ w)), W, X)
    assert report.collectives == () and "bytes sent" not in str(report)
    some = tuple(Collective("all-gather", 2, 1024 * n, 1, 1, ("f32[8]",)) for n in range(9, 0, -1))
    text = str(dataclasses.replace(report, collectives=some))
    assert "3 more" in text and "all-gather f32[8]" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["all", "18", "9", "9", "45", "KiB", "22.5", "KiB"] in rows


TPU = compiled_text("collectives_of_a_tpu")

GPU = compiled_text("collectives_of_a_gpu")


def test_one_collective_in_several_fusions_of_a_tpu_s_loop():
    (found,) = collectives(parse_hlo(TPU), {"fsdp": 4, "model": 2})
    assert found == Collective(
        "all-gather", 5, 5 * 256, 5, 5, ("bf16[8,16]",), ("fsdp",), 4
    )  # fmt: skip
    assert found.sent == found.rerun_sent == 960


def test_asynchronous_collectives_of_a_gpu():
    gathered, sent, reduced, moved = collectives(parse_hlo(GPU), {"a": 2, "b": 2})
    assert gathered == Collective(
        "all-gather", 1, 160, 0, 0, ("f32[32]", "f32[8]"), ("a", "b"), 4
    )  # fmt: skip
    assert reduced == Collective("all-reduce", 1, 32, 0, 0, ("f32[8]",), ("b",), 2)
    assert sent == Collective("send", 1, 64, 0, 0, ("f32[16]",), (), 0) and sent.sent == 64
    assert (moved.kind, moved.axes, moved.arrays, moved.sent) == (
        "collective-permute", ("a",), ("f32[8]",), 32,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("mesh['a'=4,'b'=2] {'a'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4,'b'=2] {'a','b'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
    ],
)
def test_groups_as_xla_writes_them(text, groups):
    assert groups_of(f"channel_id=1, replica_groups={text}, dimensions={{0}}", 8) == groups


def test_groups_without_a_mesh_have_no_axes():
    assert axes_of_groups(((0, 1),), {}) == ()
    assert axes_of_groups(((0, 9),), {"a": 4}) == ()
    assert axes_of_groups(((0, 2), (1, 3)), {"a": 2, "b": 1, "c": 2}) == ("a",)
