"""Recomputation changes no values: gradients, saved bytes, recomputed operators."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.remat.graphs import graphs
from tests.remat.measure import (
    bit_equal,
    largest_error,
    operators,
    rerun_operators,
    saved_bytes,
)

W = jnp.asarray(np.linspace(-0.5, 0.5, 16, dtype=np.float32).reshape(4, 4))
X = jnp.asarray(np.linspace(-0.4, 0.6, 16, dtype=np.float32).reshape(4, 4))
WS = [W + 0.1 * i for i in range(4)]


def layers(ws, x, activation=jnp.sin):
    for i, w in enumerate(ws):
        x = jrc.mark(activation(x @ w), f"layer_{i}")
    return jnp.sum(x**2)


NAMES = [f"layer_{i}" for i in range(4)]


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("activation", [jnp.sin, jnp.tanh, jax.nn.gelu, jax.nn.relu])
def test_bit_equal_to_the_plain_function_without_fusion(activation):
    plain = functools.partial(layers, activation=activation)
    lean = jrc.recompute_segments(plain, NAMES[:3])
    with jax.disable_jit():
        assert bit_equal(jax.value_and_grad(lean)(WS, X), jax.value_and_grad(plain)(WS, X))
    jitted = [jax.jit(jax.grad(f))(WS, X) for f in (lean, plain)]
    assert largest_error(*jitted) < 1e-6


def test_bit_equal_to_hand_wrapped_checkpoints():
    def hand(ws, x):
        for w in ws[:3]:
            x = jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x)
        return jnp.sum(jnp.sin(x @ ws[3]) ** 2)

    lean = jrc.recompute_segments(layers, NAMES[:3])
    assert bit_equal(jax.jit(jax.grad(lean))(WS, X), jax.jit(jax.grad(hand))(WS, X))
    assert bit_equal(jax.grad(lean)(WS, X), jax.grad(hand)(WS, X))


def test_saves_only_what_crosses():
    lean = jrc.recompute_segments(layers, NAMES[:3])
    layer = 16 * 4
    # Plain: the cosine of every layer and what squaring needs besides the layers themselves.
    assert saved_bytes(layers, WS, X) > saved_bytes(lean, WS, X)
    body = saved_bytes(lambda w, x: jnp.sum(jnp.sin(x @ w) ** 2), WS[3], X)
    assert saved_bytes(lean, WS, X) == 3 * layer + body


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("rule", ["partition", "fluid", "pass"])
@given(graph=graphs(mark_all=False), data=st.data())
@settings(max_examples=30, deadline=None)
def test_random_graphs_rerun_what_is_predicted(rule, graph, data):
    """Gradients are equal, and exactly the reported operators are recomputed."""
    live = [f"v{i}" for i in graph.live() if i in graph.marked]
    if not live:
        return
    chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
    lean = jrc.recompute_segments(graph, chosen, rule=rule)
    plain, again = (jax.grad(f, argnums=(0, 1))(W * 0.3, X * 0.3) for f in (graph, lean))
    if all(bool(jnp.isfinite(g).all()) for g in plain):
        assert largest_error(again, plain) < 1e-5

    # Without marks the names are the operators' own.
    bare = jrc.find_segments(graph, chosen, W, X, rule=rule)
    op_of = {f"v{i}": graph.ops[i][0] for i in range(len(graph.ops))}
    predicted = Counter(
        op_of.get(name, name.partition(":")[0]) for s in bare.segments for name in s.rerun
    )
    plain = functools.partial(graph, skip_dead=True)
    assert rerun_operators(lean, plain, W, X, argnums=(0, 1)) == predicted


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("rule", ["partition", "fluid", "pass"])
def test_dropout_masks_are_bit_equal(rule):
    def dropped(w, x, key):
        for i in range(3):
            key, sub = jax.random.split(key)
            x = jnp.sin(x @ w) * jax.random.bernoulli(sub, 0.5, x.shape)
            x = jrc.mark(x, f"layer_{i}")
        return jnp.sum(x), x

    lean = jrc.recompute_segments(dropped, NAMES[:3], rule=rule)
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        with jax.disable_jit():
            one, two = (jax.value_and_grad(f, has_aux=True)(W, X, key) for f in (dropped, lean))
        assert bit_equal(one[0], two[0]) and largest_error(one[1], two[1]) < 1e-6
        # Another mask would change whole entries.
        one, two = (jax.jit(jax.grad(f, has_aux=True))(W, X, key) for f in (dropped, lean))
        assert bit_equal(one[1] == 0, two[1] == 0) and largest_error(one[0], two[0]) < 1e-6


TRANSFORMS = {
    "jit": lambda f: jax.jit(jax.grad(f)),
    "vmap": lambda f: lambda ws, x: jax.vmap(jax.grad(f), (None, 0))(ws, jnp.stack([x, 2 * x])),
    "grad of vmap": lambda f: jax.grad(
        lambda ws, x: jnp.sum(jax.vmap(f, (None, 0))(ws, jnp.stack([x, 2 * x])))
    ),
    "jvp": lambda f: lambda ws, x: jax.jvp(lambda ws: f(ws, x), (ws,), (ws,)),
    "linearize": lambda f: lambda ws, x: jax.linearize(lambda ws: f(ws, x), ws)[1](ws),
    "hessian": lambda f: lambda ws, x: jax.hessian(lambda w: f([w, *ws[1:]], x))(ws[0]),
    "twice": lambda f: jax.grad(jrc.recompute_segments(f, ["layer_1"])),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: (
        lambda ws, x: jax.lax.scan(
            lambda c, _: (c + jax.grad(f)(ws, x * c)[0][0, 0], c), 1.0, None, length=3
        )
    ),
    "grad of scan": lambda f: jax.grad(
        lambda ws, x: jax.lax.scan(lambda c, _: (c + f(ws, x * c), None), 1e-3, None, length=3)[0]
    ),
    "cond": lambda f: jax.grad(
        lambda ws, x: jax.lax.cond(x[0, 0] < 5, lambda: f(ws, x), lambda: 0.0)
    ),
}


@pytest.mark.slow(after=5)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name):
    lean = jrc.recompute_segments(layers, NAMES[:3])
    got, want = (jax.jit(TRANSFORMS[name](f))(WS, X) for f in (lean, layers))
    assert largest_error(got, want) < 2e-6
    if name not in ("jvp", "linearize"):
        more = operators(TRANSFORMS[name](lean), WS, X)["dot_general"]
        assert more > operators(TRANSFORMS[name](layers), WS, X)["dot_general"]


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = Mesh(jax.devices()[:4], ("data",))

    def local(f, ws, x):
        ws = jax.lax.pcast(ws, "data", to="varying") if check_vma else ws
        grads = jax.grad(lambda ws: f(ws, x) + jax.lax.psum(f(ws, x), "data") * 0.1)(ws)
        return jax.lax.pmean(grads, "data")

    def run(f):
        sharded = jax.shard_map(
            functools.partial(local, f),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
        return jax.jit(sharded)(WS, X)

    assert largest_error(run(jrc.recompute_segments(layers, NAMES[:3])), run(layers)) < 1e-6


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_around_shard_map_and_named_sharding(kind):
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(kind,) * 2)
    ws = jax.device_put(WS, NamedSharding(mesh, P(None, "b")))
    x = jax.device_put(X, NamedSharding(mesh, P("a")))
    lean = jrc.recompute_segments(layers, NAMES[:3])
    got, want = jax.jit(jax.grad(lean))(ws, x), jax.grad(layers)(WS, X)
    assert largest_error(got, want) < 1e-6
    mesh = Mesh(mesh.devices, mesh.axis_names)
    inner = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))

    def mixed(w, x):
        return jnp.sum(jrc.mark(inner(x @ w), "h") ** 2)

    got, want = (jax.jit(jax.grad(f))(W, X) for f in (jrc.recompute_segments(mixed, ["h"]), mixed))
    assert largest_error(got, want) < 1e-6


@pytest.mark.parametrize("rule", ["fluid", "pass"])
def test_paddle_s_rules_save_random_keys_and_recompute_draws(rule):
    def loss(w, x, key):
        x = jrc.mark(jnp.sin(x @ w), "a")
        for _ in range(2):
            key, sub = jax.random.split(key)
            x = jnp.sin(x @ w) * jax.random.normal(sub, x.shape)
        return jnp.sum(jrc.mark(x, "b") ** 2)

    args = (W, X, jax.random.key(0))
    cut = jrc.find_segments(loss, ["a", "b"], *args, rule=rule)
    again = [name.partition(":")[0] for segment in cut.segments for name in segment.recomputed]
    assert "random_bits" in "".join(again) or "jit" in again
    assert not {"random_split", "random_wrap", "random_fold_in"} & set(again)
    lean = jrc.recompute_segments(loss, ["a", "b"], rule=rule)
    assert largest_error(jax.grad(lean)(*args), jax.grad(loss)(*args)) < 1e-6


def test_shardings_of_an_inlined_jit_are_kept():
    mesh = Mesh(jax.devices()[:4], ("a",))
    split = NamedSharding(mesh, P("a"))
    block = jax.jit(lambda x: jrc.mark(jnp.sin(x), "h"), in_shardings=split, out_shardings=split)

    def loss(x):
        return jnp.sum(block(x * 2) ** 2)

    lean = jrc.recompute_segments(loss, ["h"])
    assert operators(lean, X)["sharding_constraint"] == 2
    x = jax.device_put(X, split)
    assert largest_error(jax.jit(jax.grad(lean))(x), jax.grad(loss)(X)) < 1e-6


def test_closures_get_gradients():
    def loss(w):
        big = w @ w
        return jnp.sum(
            jrc.recompute_segments(lambda x: jrc.mark(jnp.sin(x @ big), "h") @ w, ["h"])(X)
        )

    def plain(w):
        return jnp.sum(jnp.sin(X @ (w @ w)) @ w)

    assert largest_error(jax.grad(loss)(W), jax.grad(plain)(W)) < 1e-6


def test_static_leaves_none_and_keywords():
    seen = []

    def loss(params, x, mode, *, depth, scale=None):
        seen.append((mode, depth, scale, params["name"]))
        for i in range(depth):
            x = jrc.mark(jnp.sin(x @ params["w"]), f"layer_{i}")
        return jnp.sum(x), {"mode": mode, "depth": depth, "none": None, "x": x}

    lean = jrc.recompute_segments(loss, ["layer_0"])
    value, out = lean({"w": W, "name": "net"}, X, "train", depth=2)
    assert seen == [("train", 2, None, "net")]
    assert out["mode"] == "train" and out["depth"] == 2 and out["none"] is None
    assert bit_equal(out["x"], loss({"w": W, "name": "net"}, X, "train", depth=2)[1]["x"])
    grads = jax.grad(lambda w: lean({"w": w, "name": ""}, np.asarray(X), "t", depth=2)[0])(W)
    want = jax.grad(lambda w: loss({"w": w, "name": ""}, X, "t", depth=2)[0])(W)
    assert largest_error(grads, want) < 1e-6
    with pytest.raises(TypeError, match="unexpected keyword"):
        lean({"w": W, "name": ""}, X, "t", depth=2, deep=3)


def test_numpy_arguments_reach_the_function_as_they_are():
    def loss(w, x, layers, table):
        for i in range(layers):
            x = jrc.mark(jnp.sin(x @ w) * float(table[i]), f"layer_{i}")
        return jnp.sum(x), np.cumsum(table)

    lean = jrc.recompute_segments(loss, ["layer_0"])
    args = (X, np.int64(2), np.array([1.0, 0.5]))
    value, table = lean(W, *args)
    assert isinstance(table, np.ndarray) and table.tolist() == [1.0, 1.5]
    got, want = (jax.grad(f, has_aux=True)(W, *args)[0] for f in (lean, loss))
    assert largest_error(got, want) < 1e-6


def test_integers_booleans_and_keys_cross_segments():
    def loss(w, tokens, key):
        one_hot = jrc.mark(jax.nn.one_hot(tokens, 4), "one_hot")
        keys = jrc.mark(jax.random.split(key, 2), "keys")
        mask = jrc.mark(jax.random.bernoulli(keys[0], 0.5, (4, 4)), "mask")
        x = jrc.mark(jnp.where(mask, one_hot @ w, 0.0), "x")
        return jnp.sum(x * jax.random.normal(keys[1], x.shape))

    args = (W, jnp.arange(4), jax.random.key(3))
    lean = jrc.recompute_segments(loss, ["one_hot", "keys", "mask", "x"])
    assert largest_error(jax.grad(lean)(*args), jax.grad(loss)(*args)) < 1e-6


def test_constructs_inside_segments():
    """Loops, branches, custom rules, sorting and solving inside a segment are recomputed whole."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

    def loss(w, x):
        x = jrc.mark(jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=3)[0], "a")
        x = (
            jax.lax.while_loop(
                lambda c: jnp.sum(c) > 1e9, lambda c: c * 0.5, jax.lax.stop_gradient(x)
            )
            + x
        )
        x = jrc.mark(jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), "b")
        x = jrc.mark(clipped(jnp.sort(x, axis=0)) + jax.nn.relu(x), "c")
        x = jnp.linalg.solve(jnp.eye(4) * 3 + 0.1 * w, x)
        return jnp.sum(jrc.mark(x, "d") ** 2)

    lean = jrc.recompute_segments(loss, ["a", "b", "c", "d"])
    assert largest_error(jax.jit(jax.grad(lean))(W, X), jax.jit(jax.grad(loss))(W, X)) < 1e-6


def test_checkpoint_name_tags_are_marks():
    def loss(w, x):
        return jnp.sum(checkpoint_name(jnp.sin(checkpoint_name(x @ w, "dot")), "sin"))

    cut = jrc.find_segments(loss, ["sin"], W, X)
    assert cut.segments[0].recomputed == ("dot",) and cut.held == ("sin",)
    lean = jrc.recompute_segments(loss, ["sin"])
    assert rerun_operators(lean, loss, W, X)["dot_general"] == 1
    assert largest_error(jax.grad(lean)(W, X), jax.grad(loss)(W, X)) < 1e-6


def test_segments_that_are_not_recomputed():
    def dots(**options):
        lean = jrc.recompute_segments(layers, NAMES[:3], **options)
        return rerun_operators(lean, layers, WS, X)["dot_general"]

    assert [dots(), dots(no_recompute_segments=[0]), dots(no_recompute_segments=[0, 2])] == [
        3,
        2,
        1,
    ]
    assert dots(no_recompute_segments=(0, 1, 2)) == 0


def test_effects_are_kept(capfd):
    def loss(w, x):
        h = jnp.sin(x @ w)
        jax.debug.print("h {}", h[0, 0])
        return jnp.sum(jrc.mark(h, "h"))

    jax.grad(jrc.recompute_segments(loss, ["h"]))(W, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("h ") >= 1


def test_result_that_is_an_input_or_a_constant():
    def odd(w, x):
        return {"w": w, "one": jnp.ones(()), "h": jrc.mark(jnp.sin(x @ w), "h"), "five": 5}

    assert bit_equal(jrc.recompute_segments(odd, ["h"])(W, X), odd(W, X))


def test_the_wrapped_function_keeps_its_name():
    lean = jrc.recompute_segments(layers, NAMES[:1])
    assert lean.__name__ == "layers" and lean.__wrapped__ is layers


def hidden(kind):
    inner = lambda c: jrc.mark(jnp.sin(c), "h")  # noqa: E731
    with_jvp = jax.custom_jvp(inner)
    with_jvp.defjvp(lambda primals, tangents: (inner(*primals), tangents[0]))
    with_vjp = jax.custom_vjp(inner)
    with_vjp.defvjp(lambda x: (inner(x), None), lambda _, g: (g,))
    bodies = {
        "lax.scan": lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0],
        "lax.while_loop": lambda x: jax.lax.while_loop(lambda c: jnp.sum(c) > 9, inner, x),
        "lax.cond": lambda x: jax.lax.cond(x[0, 0] > 0, inner, jnp.cos, x),
        "a jax.checkpoint region": lambda x: jax.checkpoint(inner)(x),
        "a custom_jvp function": with_jvp,
        "a custom_vjp function": with_vjp,
        "jax.shard_map": lambda x: jax.shard_map(
            inner,
            mesh=Mesh(jax.devices()[:2], ("i",)),
            in_specs=P("i"),
            out_specs=P("i"),
        )(x),
    }
    return bodies[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "lax.scan",
        "lax.while_loop",
        "lax.cond",
        "a jax.checkpoint region",
        "a custom_jvp function",
        "a custom_vjp function",
        "jax.shard_map",
    ],
)
def test_a_mark_inside_a_construct_is_a_clear_error(kind):
    def loss(x):
        return jnp.sum(jrc.mark(hidden(kind)(x), "out"))

    with pytest.raises(ValueError) as error:
        jrc.recompute_segments(loss, ["h"])(X)
    text = str(error.value)
    assert "got 'h', which stands inside " + kind in text and "of `loss`" in text
    assert "test_segments.py:" in text and "Mark the result of that construct" in text
    assert jrc.find_segments(loss, ["out"], X).held == ("out",)


def test_errors_have_the_rule_the_value_and_the_way_out():
    def loss_fn(w, x):
        return jnp.sum(jrc.mark(jrc.mark(x @ w, "fc_1") @ w, "pred"))

    with pytest.raises(ValueError) as error:
        jrc.find_segments(loss_fn, ["fc_9"], W, X)
    assert str(error.value) == (
        "jrc.find_segments: checkpoints must name marks of `loss_fn` ('fc_1', 'pred'), got 'fc_9' "
        "(did you mean 'fc_1'?). Name a value with jrc.mark(x, name), or leave the name out."
    )
    with pytest.raises(ValueError, match=r"\(none\), got 'a'. Name a value with jrc.mark"):
        jrc.find_segments(lambda x: x, ["a"], X)
    with pytest.raises(TypeError, match="checkpoints must be a list of mark names, got str 'pred'"):
        jrc.recompute_segments(loss_fn, "pred")
    with pytest.raises(TypeError, match="checkpoints must contain names of marks, got"):
        jrc.recompute_segments(loss_fn, [W])
    with pytest.raises(
        ValueError, match="rule must be one of 'partition', 'fluid', 'pass', got 'fluidd'"
    ):
        jrc.recompute_segments(loss_fn, ["pred"], rule="fluidd")
    with pytest.raises(
        ValueError, match=r"segments\[0\] must be a whole number from 0 to 0, got 1"
    ):
        jrc.recompute_segments(loss_fn, ["pred"], no_recompute_segments=[1])(W, X)
    with pytest.raises(ValueError, match="got -1"):
        jrc.recompute_segments(loss_fn, ["pred"], no_recompute_segments=[-1])(W, X)
    with pytest.raises(ValueError, match="must name each segment once, got"):
        jrc.recompute_segments(loss_fn, ["pred"], no_recompute_segments=[0, 0])(W, X)
    with pytest.raises(TypeError, match=r"segments\[0\] must be a whole number.*got 'a'"):
        jrc.recompute_segments(loss_fn, ["pred"], no_recompute_segments=["a"])(W, X)
    with pytest.raises(ValueError, match="name must not be empty nor contain '#'"):
        jrc.mark(X, "a#2")
    with pytest.raises(TypeError, match="name must be a string, got int 3"):
        jrc.mark(X, 3)


def test_notices_are_logged_once(caplog):
    def loss(w, x):
        a = jrc.mark(jnp.sin(x @ w), "a")
        b = jrc.mark(jnp.cos(a), "b")
        return jnp.sum(jrc.mark(b @ w, "c") * a) + jnp.sum(jrc.mark(x, "input"))

    lean = jrc.recompute_segments(loss, ["b", "input"])
    fluid = jrc.recompute_segments(loss, ["a", "b", "unknown"], rule="fluid")
    with caplog.at_level("INFO", logger="jrc"):
        for _ in range(2):
            jax.grad(lean)(W, X)
            jax.grad(fluid)(W, X)
    texts = [record.getMessage() for record in caplog.records if record.name == "jrc"]
    assert len(texts) == len(set(texts)) == 4
    assert texts[0].startswith(
        "jrc.recompute_segments: 1 value crosses from one segment into another and is saved "
        "besides the boundaries: a. Better boundaries"
    )
    assert "boundary 'input' cuts nothing" in texts[1] and "boundary 'unknown' cuts" in texts[2]
    assert "between 'a' and 'b' there is too little to recompute" in texts[3]


def test_results_of_one_equation_are_saved_one_by_one():
    def loss(w, x):
        left, right = jnp.split(jrc.mark(x @ w, "a"), 2)
        return jnp.sum(jrc.mark(jnp.sin(left), "b") @ w) + jnp.sum(right)

    cut = jrc.find_segments(loss, ["b"], W, X)
    assert len(cut.held) == 2 and cut.crossing[0].startswith("split:(2,4)@")
    lean = jrc.recompute_segments(loss, ["b"])
    assert largest_error(jax.grad(lean)(W, X), jax.grad(loss)(W, X)) < 1e-6


@pytest.mark.slow
def test_memory_is_that_of_hand_wrapped_checkpoints():
    """For different ends of a block, and with random draws."""
    w, x, key = jnp.ones((64, 64)) * 0.01, jnp.ones((256, 64)), jax.random.key(0)

    def drop(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)

    ends = {
        "exp tanh": lambda x, key: jnp.exp(jnp.tanh(x)),
        "tanh": lambda x, key: jnp.tanh(x),
        "reshapes": lambda x, key: jnp.tanh(jnp.exp(x).reshape(-1, 64, 2)).reshape(x.shape),
        "rsqrt": lambda x, key: jax.lax.rsqrt(x + 9),
        "dropout": drop,
    }

    def block(end, w, x, key):
        return end(jnp.sin(x @ w) @ w, key)

    def stack(end, call, w, x, key):
        for i in range(4):
            x = jrc.mark(
                call(functools.partial(block, end), w, x, jax.random.fold_in(key, i)), f"b{i}"
            )
        return jnp.sum(x)

    def temporaries(loss):
        return (
            jax.jit(jax.grad(loss)).lower(w, x, key).compile().memory_analysis().temp_size_in_bytes
        )

    plainly = lambda f, *args: f(*args)  # noqa: E731
    for name, end in ends.items():
        hand = temporaries(functools.partial(stack, end, lambda f, *args: jax.checkpoint(f)(*args)))
        names = [f"b{i}" for i in range(4)]
        ours = temporaries(jrc.recompute_segments(functools.partial(stack, end, plainly), names))
        call = temporaries(functools.partial(stack, end, jrc.recompute))
        # At most the result of one block more.
        assert max(ours, call) <= hand + x.nbytes, (name, hand, ours, call)


def test_constants_come_back_as_arrays_and_keywords_in_order():
    def f(x, **weights):
        for w in weights.values():
            x = jnp.sin(x @ w)
        return jrc.mark(x, "h"), jnp.float32(3.0), jnp.asarray(2.0)

    for call in (jrc.recompute_segments(f, ["h"]), functools.partial(jrc.recompute, f)):
        out = call(X, z=W, a=W.T * 2)
        assert all(isinstance(leaf, jax.Array) for leaf in out)
        assert largest_error(out, f(X, z=W, a=W.T * 2)) < 1e-6


def test_marks_in_a_jit_with_explicit_shardings():
    mesh = jax.make_mesh((2, 2), ("d", "m"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        w = jax.device_put(W, NamedSharding(mesh, P()))
        out = NamedSharding(mesh, P("d", None))
        block = jax.jit(lambda w, x: jrc.mark(jnp.sin(x @ w), "a"), out_shardings=out)

        def loss(w, x):
            return jnp.sum(block(w, x) ** 2)

        got, want = (jax.grad(f)(w, x) for f in (jrc.recompute_segments(loss, ["a"]), loss))
        assert largest_error(got, want) < 1e-6


def notices_of(caplog, *args, **options):
    caplog.clear()
    with caplog.at_level("INFO", logger="jrc"):
        jrc.recompute_segments(*args, **options)(W, X)
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "jrc"]


def three(w, x):
    for i in range(3):
        x = jrc.mark(jnp.sin(jnp.tanh(x @ w)), f"fc_{i}")
    return jnp.sum(x)


@pytest.mark.parametrize("rule", ["fluid", "pass"])
def test_a_mistyped_boundary_is_a_warning(caplog, rule):
    ((level, text),) = notices_of(caplog, three, ["fc_0", "fc_1", "fc2"], rule=rule)
    assert level == "WARNING" and "boundary 'fc2' cuts nothing" in text
    assert "did you mean 'fc_2'" in text and "'fc_0', 'fc_1', 'fc_2'" in text


def test_a_pattern_that_matches_nothing_is_a_warning(caplog):
    patterns = [
        {"main_ops": ["dot_generl"]},
        {"main_ops": ["dot_general"], "suf_ops": ["sin"]},
        {"main_ops": ["dot_general"], "suf_ops": ["tanh"]},
        {"main_ops": ["cos"], "num": 0},
    ]
    found = notices_of(caplog, three, ["fc_0"], keep_patterns=patterns)
    assert [level for level, _ in found] == ["WARNING"] * 2
    assert "keep_patterns[0] matches nothing" in found[0][1]
    assert "no operator 'dot_generl' (did you mean 'dot_general'?)" in found[0][1]
    assert "keep_patterns[1] matches nothing: no segment has the operators" in found[1][1]


def test_only_true_crossings_are_reported_and_once(caplog):
    def loss(w, x):
        key = jax.random.key(0)
        early = []
        for i in range(3):
            early.append(jrc.mark(jnp.cos(x), f"cos_{i}"))
            x = jnp.sin(x @ w) * jax.random.normal(jax.random.fold_in(key, i), x.shape)
            x = jrc.mark(x, f"fc_{i}")
        return jnp.sum(x) + sum(map(jnp.sum, early))

    names = ["fc_0", "fc_1", "fc_2"]
    products = [{"main_ops": ["dot_general"]}]
    assert notices_of(caplog, three, names, rule="fluid", keep_patterns=products) == []
    for rule in ("partition", "fluid"):
        ((level, text),) = notices_of(caplog, loss, names, rule=rule, keep_patterns=products)
        assert level == "INFO" and "Better boundaries" in text
        assert "3 values cross from one segment into another" in text
        assert "boundaries: cos_0, cos_1, cos_2." in text
    cut = jrc.find_segments(loss, names, W, X, rule="fluid", keep_patterns=products)
    # The key that all of them fold does cross; at 8 bytes it is no reason to move a boundary.
    assert [n for n in cut.crossing if not n.startswith("random_")] == ["cos_0", "cos_1", "cos_2"]
    # The values that a pattern saves are saved, and cross nothing.
    assert any(name.startswith("dot_general") for name in cut.held)
