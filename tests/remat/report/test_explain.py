"""Saved values and recomputed operators of a report, against those of JAX's own derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jrc
from jrc._jaxpr import inline_marked, live_equations
from jrc.models import gpt
from jrc.remat._gradient.compiled_memory import memory_of
from jrc.remat._gradient.loss import loss_of
from jrc.remat._gradient.recompute_count import reruns
from jrc.remat._gradient.saved_values import saved_values, total_bytes
from tests.remat.graphs import graphs
from tests.remat.measure import compiled_products, rerun_operators, saved_bytes

W = jnp.linspace(-0.5, 0.5, 64).reshape(8, 8)
X = jnp.linspace(-0.4, 0.6, 32).reshape(4, 8)
NAMES = jax.checkpoint_policies.save_only_these_names("h")


def block(w, x):
    return jnp.sin(checkpoint_name(jnp.sin(x @ w), "h") @ w)


def chain(w, x):
    for i in range(3):
        x = jrc.mark(jnp.tanh(jnp.sin(x @ w)), f"b{i}")
    return jnp.sum(x)


def twice(once):
    return lambda w, x: jnp.sum(once(w, once(w, x)))


def scanned(step, length=5):
    return lambda w, x: jnp.sum(
        jax.lax.scan(lambda c, _: (step(w, c), None), x, None, length=length)[0]
    )


def few_carries(w, x, segments=2):
    step = lambda c, _: (block(w, c), None)  # noqa: E731
    return jnp.sum(jrc.recompute_scan(step, x, None, length=7, segments=segments)[0])


def loop_in_loop(w, x):
    inner = lambda c: jax.lax.scan(lambda d, _: (jnp.tanh(d @ w), None), c, None, length=3)[0]  # noqa: E731
    return jnp.sum(jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=4)[0])


def rows(w, x):
    step = lambda c, row: (jnp.sin(c * row), jnp.cos(c))  # noqa: E731
    return jnp.sum(jax.lax.scan(step, x[0], x)[1])


def branches(w, x):
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(x @ w), lambda: jnp.cos(x)))


def nested_jit(w, x):
    inner = jax.jit(lambda w, x: jrc.mark(jax.nn.gelu(jax.nn.relu(x @ w)), "g"))
    return jnp.sum(inner(w, x) @ w)


def masked(w, x):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return jnp.sum(jnp.where(keep, jax.nn.softmax(x @ w), 0.0) ** 3)


def repeated(operator):
    def loss(w, x):
        for _ in range(3):
            x = operator(x @ w)
        return jnp.sum(x)

    return loss


def kept_gelu(w, x):
    return jnp.sum(jrc.recompute(lambda w, x: jnp.sin(jrc.keep_op(jax.nn.gelu)(x @ w)) @ w, w, x))


def linen_net(w, x):
    return jnp.sum(jrc.recompute_module(Net()).apply({"params": {"first": {"kernel": w}}}, x))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sin(nn.Dense(8, use_bias=False, name="first")(x))


# Each function, with the one that recomputes nothing if it recomputes something.
FUNCTIONS = {
    "plain": (chain, None),
    "segments": (jrc.recompute_segments(chain, ["b0", "b1"]), chain),
    "all segments": (jrc.recompute_segments(chain, ["b0", "b1", "b2"]), chain),
    "products": (
        jrc.recompute_segments(chain, ["b1"], keep=jrc.SavePrimitives("dot_general")),
        chain,
    ),
    "sines": (jrc.recompute_segments(chain, ["b0", "b1"], keep=jrc.SavePrimitives("sin")), chain),
    "rules": (jrc.apply_rules(chain, jrc.SavePrimitives("dot_general")), chain),
    "rules, one": (jrc.apply_rules(chain, jrc.RecomputePrimitives("tanh")), chain),
    "checkpoint": (twice(jax.checkpoint(block)), twice(block)),
    "names": (twice(jax.checkpoint(block, policy=NAMES)), twice(block)),
    "dots": (
        twice(jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)),
        twice(block),
    ),
    "recompute": (twice(functools.partial(jrc.recompute, block)), twice(block)),
    "recompute, checkpoint": (
        twice(functools.partial(jrc.recompute, block, use_reentrant=False)),
        twice(block),
    ),
    "keep_op": (kept_gelu, lambda w, x: jnp.sum(jnp.sin(jax.nn.gelu(x @ w)) @ w)),
    "scan": (scanned(block), None),
    "scan of checkpoint": (scanned(jax.checkpoint(block)), scanned(block)),
    "scan of names": (scanned(jax.checkpoint(block, policy=NAMES)), scanned(block)),
    "loop in loop": (loop_in_loop, None),
    "rows": (rows, None),
    "branches": (branches, None),
    "nested jit": (nested_jit, None),
    "dropout": (masked, None),
    "linen": (linen_net, None),
    "one call, three times": (repeated(jax.nn.silu), None),
    "one tagged call, three times": (repeated(jrc.keep_op(jax.nn.silu)), None),
}


def report_parts(fn, *args, argnums=(0, 1)):
    """Return saved values and counts of recomputed operators, without compiling anything."""
    loss = loss_of(fn, args, argnums, False)
    gradient = inline_marked(
        jax.make_jaxpr(loss.gradient)(loss.perturbed, loss.rest), lambda _: True
    )
    return saved_values(loss), reruns(loss.program.jaxpr, live_equations(gradient))


@pytest.mark.slow(after=5, every=True)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_saved_bytes_are_those_of_the_derivative(name):
    fn, _ = FUNCTIONS[name]
    assert total_bytes(report_parts(fn, W, X)[0]) == saved_bytes(fn, W, X)


@pytest.mark.parametrize("name", [name for name, (_, plain) in FUNCTIONS.items() if plain])
def test_recomputed_operators_are_counted(name):
    fn, plain = FUNCTIONS[name]
    found = {each.primitive: each.count for each in report_parts(fn, W, X)[1]}
    more = rerun_operators(fn, plain, W, X, argnums=(0, 1))
    for operator in ("dot_general", "sin", "tanh", "exp"):
        assert found.get(operator, 0) == more[operator]


@pytest.mark.parametrize("name", ["segments", "all segments", "sines", "names", "recompute"])
def test_recomputed_products_are_in_the_compiled_program(name):
    fn, plain = FUNCTIONS[name]
    found = {each.primitive: each.count for each in report_parts(fn, W, X, argnums=0)[1]}
    more = compiled_products(fn, W, X) - compiled_products(plain, W, X)
    assert found.get("dot_general", 0) == more > 0


@pytest.mark.parametrize("name", [name for name, (_, plain) in FUNCTIONS.items() if not plain])
def test_what_runs_once_is_not_counted(name):
    if name != "linen":
        assert report_parts(FUNCTIONS[name][0], W, X)[1] == ()


@pytest.mark.slow
@given(graph=graphs(mark_all=False), data=st.data())
@settings(max_examples=12, deadline=None)
def test_random_programs(graph, data):
    """Bytes are those of the derivative, operators those of the compiled program."""
    marked = sorted(i for i in graph.marked if i in graph.live())
    chosen = data.draw(st.sets(st.sampled_from(marked))) if marked else set()
    recomputed = jrc.recompute_segments(graph, [f"v{i}" for i in sorted(chosen)])
    w, x = W[:4, :4] + 0, X[:4, :4] + 0
    for fn in (graph, recomputed):
        saved, rerun = report_parts(fn, w, x)
        assert total_bytes(saved) == saved_bytes(fn, w, x)
    found = {each.primitive: each.count for each in rerun}
    plain = functools.partial(graph, skip_dead=True)
    more = rerun_operators(recomputed, plain, w, x, argnums=(0, 1))
    for operator in ("dot_general", "sin", "tanh", "exp"):
        assert found.get(operator, 0) == more[operator]


@pytest.mark.parametrize("segments, skipped", [(7, 0), (2, 4), (1, 6)])
def test_a_loop_with_few_carries(segments, skipped):
    """Steps recomputed for their carry, and each step once more with its derivative."""
    fn = functools.partial(few_carries, segments=segments)
    saved, rerun = report_parts(fn, W, X)
    assert total_bytes(saved) == saved_bytes(fn, W, X)
    found = {each.primitive: each.count for each in rerun}
    # Two products per step; only the next step reads the last sine of a step.
    assert found["dot_general"] == 2 * (7 + skipped) and found["sin"] == 7 + 2 * skipped
    assert [value.times for value in saved] == [segments] if segments > 1 else not saved[1:]


def test_recomputation_with_other_random_bits_is_counted():
    def draw(w, x, key):
        return jnp.sin(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0.0))

    key = jax.random.key(0)
    fn = lambda w, x: jnp.sum(jrc.recompute(draw, w, x, key, preserve_rng_state=False))  # noqa: E731
    found = {each.primitive: each.count for each in report_parts(fn, W, X)[1]}
    assert found["dot_general"] == 1 and found["random_bits"] == 1 and "sin" not in found


def test_recomputation_of_what_jax_traced_for_several_calls_is_counted():
    """The bits of masks, `jnp.roll`, `jnp.where`: JAX traces each once, and inlines no call."""

    def block(w, x, key):
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(kept, jax.nn.gelu(jnp.roll(x @ w, 1, 0)), 0.0)

    def loss(ws, x, key):
        for i, w in enumerate(ws):
            x = jax.checkpoint(block)(w, x, jax.random.fold_in(key, i))
        return jnp.sum(x)

    report = jrc.explain(loss, [W] * 3, X, jax.random.key(0))
    found = {each.primitive: each.count for each in report.rerun}
    once = "random_bits", "dot_general", "lt", "or", "concatenate", "tanh", "integer_pow"
    assert [found[name] for name in once] == [3] * len(once) and found["slice"] == 6


def test_the_origin_of_a_saved_value():
    def loss(w, x):
        x = jrc.mark(jnp.tanh(x @ w), "first")
        step = lambda c, _: (jrc.mark(jnp.tanh(c @ w), "inner"), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x @ w, None, length=5)[0])

    saved, _ = report_parts(loss, W, X)
    first = next(value for value in saved if value.mark == "first")
    inner = next(value for value in saved if value.mark == "inner")
    line = loss.__code__.co_firstlineno
    assert (first.bytes, first.shape, first.dtype) == (128, (4, 8), "float32")
    assert (first.primitive, first.times, first.origin) == ("tanh", 1, ())
    assert first.place == f"test_explain.py:{line + 1}"
    assert (inner.bytes, inner.shape, inner.times) == (5 * 128, (4, 8), 5)
    assert inner.origin == (f"lax.scan at test_explain.py:{line + 3}",)


def test_inside_shard_map_bytes_are_those_of_one_device():
    def loss(mesh, w, x):
        run = lambda w, x: jnp.sin(jnp.sin(x @ w) @ w)  # noqa: E731
        specs = {"in_specs": (P(), P("d")), "out_specs": P("d")}
        return jnp.sum(jax.shard_map(run, mesh=mesh, **specs)(w, x))

    found = []
    for devices in (1, 4):
        mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,))
        saved, _ = report_parts(functools.partial(loss, mesh), W, X)
        found.append([(v.primitive, v.shape, v.bytes) for v in saved])
    assert found[0] == [("cos", (4, 8), 128), ("sin", (4, 8), 128), ("cos", (4, 8), 128)]
    assert found[1] == [("cos", (1, 8), 32), ("sin", (1, 8), 32), ("cos", (1, 8), 32)]


def test_repeated_marks_are_numbered():
    def loss(w, x):
        for _ in range(2):
            x = jrc.mark(jnp.tanh(x @ w), "h")
        return jnp.sum(x @ w)

    saved, _ = report_parts(loss, W, X)
    assert [value.mark for value in saved if value.mark] == ["h", "h#2"]


def test_an_nnx_module_is_an_argument():
    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            return jnp.sin(self.linear(x))

    model = Block(rngs=nnx.Rngs(0))
    report = jrc.explain(lambda model, x: jnp.sum(model(x)), model, X)
    assert [(v.primitive, v.bytes) for v in report.saved] == [("cos", 128)]
    assert report.memory.arguments == 256 + 128
    recomputed = jrc.explain(lambda model, x: jnp.sum(jrc.recompute_module(model)(x)), model, X)
    assert recomputed.saved == ()
    assert [(r.primitive, r.count) for r in recomputed.rerun] == [("dot_general", 1)]


def test_any_leaf_may_be_an_argument():
    def loss(params, x, key, mode, scale):
        assert mode == "train" and scale == 2
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        out = jnp.where(keep, x @ params["w"], 0.0) * params["gain"]
        return jnp.sum(jnp.sin(out)) * scale, {"mode": mode, "out": out}

    key = jax.random.key(0)
    given = ({"w": np.ones((8, 8)), "gain": 2.0}, np.ones((4, 8)), key, "train", 2)
    report = jrc.explain(loss, *given, has_aux=True)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), (W, X, key))
    same = jrc.explain(loss, {"w": shapes[0], "gain": 2.0}, *shapes[1:], "train", 2, has_aux=True)
    assert (report.saved, report.memory) == (same.saved, same.memory)
    # The value, the gradients of `w` and `gain`, and the `out` of the auxiliary result.
    assert report.memory.outputs >= 4 + 256 + 4 + 128 and report.saved_bytes > 0


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("rerun", [False, True])
def test_memory_and_flops_are_those_of_the_gradient(rerun):
    """The name scopes of marks do not change the compiled program's memory."""
    config = gpt.Config(layers=2, heads=2, width=16, length=8)
    params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((2, 9), jnp.int32)
    loss = functools.partial(gpt.loss, config=config)
    loss = jrc.recompute_segments(loss, config.boundaries) if rerun else loss
    report = jrc.explain(loss, params, batch)
    assert report.name == "loss" and report.memory == memory_of(
        jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile()
    )
    marks = [point.mark for point in report.live if point.mark]
    assert marks == ["block_0", "block_1"]
    highest = max(point.bytes for point in report.live)
    assert 0.8 < highest / (report.memory.outputs + report.memory.temporaries) < 1.1
    phases = [point.phase for point in report.live]
    assert phases[0] == "forward" and phases[-1] == "backward"
    assert sum(report.by_line.values()) == report.saved_bytes
    assert report.by_mark == ({"block_0": 1024} if rerun else {})
    products = next((r.count for r in report.rerun if r.primitive == "dot_general"), 0)
    assert products == (5 * 2 if rerun else 0) and (report.rerun_flops > 0) == rerun


def test_a_derivative_inside_of_the_function():
    """Dead operators, dead marks, and a region that is differentiated twice."""

    def loss(w, x):
        inner = lambda w: jnp.sum(jax.checkpoint(block)(w, jrc.mark(jnp.tanh(x @ w), "t")))  # noqa: E731
        jrc.mark(jnp.cos(x @ w), "unused")
        return jnp.sum(jax.grad(inner)(w) ** 2)

    report = jrc.explain(loss, W, X)
    assert report.memory == memory_of(jax.jit(jax.value_and_grad(loss)).lower(W, X).compile())
    assert {point.mark for point in report.live} <= {None, "t"}


def test_offloaded_values_are_in_another_memory():
    with pytest.warns(UserWarning, match="moves nothing on CPU"):
        recomputed = jrc.recompute_segments(chain, ["b0", "b1", "b2"], keep=jrc.Offload("b0", "b1"))
        saved, _ = report_parts(recomputed, W, X)
    assert [(v.mark, v.memory, v.bytes) for v in saved] == [
        ("b0", "pinned_host", 128),
        ("b1", "pinned_host", 128),
    ]
    assert total_bytes(saved) == 0


ERRORS = {
    "no function": (
        lambda: jrc.explain(3, W),
        TypeError,
        "jrc.explain: fn must be a function, got int.",
    ),
    "no scalar": (
        lambda: jrc.explain(lambda w: w, W),
        TypeError,
        "must return a floating scalar, the loss, got float32[8, 8]. Sum or average what it",
    ),
    "a pair": (
        lambda: jrc.explain(lambda w: (jnp.sum(w), w), W),
        TypeError,
        "got tuple. Return the loss alone; if it returns (loss, aux), pass has_aux=True.",
    ),
    "no pair": (
        lambda: jrc.explain(lambda w: jnp.sum(w), W, has_aux=True),
        TypeError,
        "`<lambda>` must return a pair (loss, aux) with has_aux=True, got",
    ),
    "argnums": (
        lambda: jrc.explain(lambda w: jnp.sum(w), W, argnums=1),
        ValueError,
        "argnums must be positions of the 1 arguments given to `<lambda>`, got 1.",
    ),
    "argnums, text": (
        lambda: jrc.explain(lambda w: jnp.sum(w), W, argnums="w"),
        TypeError,
        "argnums must be a position or a tuple of them, got 'w'.",
    ),
    "nothing floating": (
        lambda: jrc.explain(lambda n, w: jnp.sum(w), 3, W),
        ValueError,
        "with a floating array, got 0, and arguments (0,) of `<lambda>` have none.",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_way_out(case):
    call, kind, text = ERRORS[case]
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value) and str(error.value).startswith("jrc.explain: ")


def test_marks_with_a_cache_of_compiled_programs():
    # The programs differ in their marks alone, and the tests share a cache of compiled programs.
    assert jax.config.jax_compilation_cache_dir

    def marked(*names):
        def loss(w, x):
            for name in names:
                x = jnp.cos(jnp.tanh(x @ w))
                x = jrc.mark(x, name) if name else x
            return jnp.sum(x)

        return loss

    for names in (("one", "two"), (None, None), ("three", "four"), (None, "two"), (None, None)):
        live = jrc.explain(marked(*names), W, X).live
        assert {point.mark for point in live if point.mark} == {name for name in names if name}


def test_machine_code_that_is_not_optimised_has_the_same_instructions():
    """So that a report compiles in a fraction of the time."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x * jnp.sort(x))

    lowered = jax.jit(jax.value_and_grad(loss)).lower([jnp.ones((16, 16))] * 3, jnp.ones((32, 16)))
    levels = ({"xla_backend_optimization_level": level} for level in (0, 3))
    texts = [lowered.compile(compiler_options=options).as_text() for options in levels]
    assert texts[0] == texts[1]
