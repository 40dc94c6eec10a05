"""Rules and tags: what they save is saved, what they recompute is; the innermost one wins."""

import functools
import gc

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import jrc
from tests.remat.graphs import UNARY, graphs
from tests.remat.measure import (
    bit_equal,
    compiled_products,
    largest_error,
    operators,
    rerun_operators,
    saved_bytes,
)

W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
X = jnp.linspace(-0.4, 0.6, 16).reshape(4, 4)
ONE = W.nbytes

OWN_RESULT = {
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
}
READS_ARGUMENT = {
    "sin": jnp.sin,
    "gelu": jax.nn.gelu,
    "softmax": jax.nn.softmax,
    "silu": jax.nn.silu,
    "log": lambda x: jnp.log(x * x + 1),
    "rsqrt": lambda x: jax.lax.rsqrt(x * x + 1),
}
# A derivative reads the result of the first, and the argument of the second; then all others.
KEPT = ["tanh", "sin", "softmax", "gelu", "relu", "exp", "sigmoid", "silu", "log", "rsqrt"]


def layers(w, x, op, count=3):
    for i in range(count):
        x = jrc.mark(op(x @ w), f"h{i}")
    return jnp.sum(x * jnp.cos(x))


MARKS = [f"h{i}" for i in range(3)]


def dots(lean, plain, *args):
    return rerun_operators(lean, plain, *args)["dot_general"]


def assert_same(lean, plain, *args, tolerance=2e-6):
    every = tuple(range(len(args)))

    def derivatives(f, *args):
        again = jax.grad(lambda w: jnp.sum(jax.grad(f)(w, *args[1:])))(args[0])
        return jax.value_and_grad(f, every)(*args), again, jax.jvp(f, args, args)

    # One program of each, and not one for each operator.
    one, two = (jax.jit(functools.partial(derivatives, f))(*args) for f in (lean, plain))
    for got, want, most in zip(one, two, (tolerance, 2e-5, 1e-5), strict=True):
        assert largest_error(got, want) < most


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("name", OWN_RESULT)
def test_a_saved_result_needs_nothing_that_comes_before_it(name):
    """The derivative of tanh reads its own result: with that saved, no product is recomputed."""
    plain = functools.partial(layers, op=OWN_RESULT[name])
    lean = jrc.apply_rules(plain, jrc.Save(*MARKS))
    assert dots(lean, plain, W, X) == 0
    # Only the marked values.
    assert saved_bytes(lean, W, X) == 3 * ONE
    assert_same(lean, plain, W, X)


def test_the_operand_of_a_saved_result_is_recomputed_if_the_derivative_reads_it():
    plain = functools.partial(layers, op=jnp.sin)
    lean = jrc.apply_rules(plain, jrc.Save(*MARKS))
    assert saved_bytes(lean, W, X) == 3 * ONE and dots(lean, plain, W, X) == 3
    assert_same(lean, plain, W, X)


@pytest.mark.exhaustive(after=6)
@pytest.mark.slow(after=2)
@pytest.mark.parametrize("region", ["recompute", "checkpoint build", "segments", "rules"])
@pytest.mark.parametrize("name", KEPT)
def test_neither_a_kept_operator_nor_its_operand_is_recomputed(name, region):
    op = (OWN_RESULT | READS_ARGUMENT)[name]
    plain = functools.partial(layers, op=op)
    kept = functools.partial(layers, op=jrc.keep_op(op))
    regions = {
        "recompute": lambda f: functools.partial(jrc.recompute, f),
        "checkpoint build": lambda f: functools.partial(jrc.recompute, f, use_reentrant=False),
        "segments": lambda f: jrc.recompute_segments(f, ["h2"]),
        "rules": lambda f: jrc.apply_rules(f, jrc.Save("h2")),
    }
    lean, all_again = regions[region](kept), regions[region](plain)
    # `custom_vjp` has gradients of all arguments, so all of them are asked for.
    count = [operators(jax.grad(f, (0, 1)), W, X)["dot_general"] for f in (lean, plain, all_again)]
    assert count[0] == count[1] < count[2]
    grads = [jax.jit(jax.grad(f, (0, 1)))(W, X) for f in (lean, plain)]
    assert largest_error(*grads) < (1e-4 if name == "softmax" else 2e-6)
    if region != "recompute":
        assert largest_error(*(jax.jvp(f, (W, X), (X, W)) for f in (lean, plain))) < 1e-5


def test_only_the_result_of_a_kept_product_is_saved():
    """Its operands are recomputed, which costs no product."""

    def loss(w, x, dot):
        for _ in range(3):
            x = jnp.sin(dot(x, w))
        return jnp.sum(x)

    plain = functools.partial(loss, dot=jnp.dot)
    lean = functools.partial(jrc.recompute, functools.partial(loss, dot=jrc.keep_op(jnp.dot)))
    again = rerun_operators(lean, plain, W, X, argnums=(0, 1))
    assert again["dot_general"] == 0 and again["sin"] == 2
    assert saved_bytes(lean, W, X) == 3 * ONE


def test_primitives_are_saved_as_by_the_policy_of_jax():
    def loss(w, x):
        for _ in range(3):
            x = jax.nn.gelu(x @ w)
        return jnp.sum(jnp.einsum("ij,jk->ik", x, w) ** 2)

    lean = jrc.apply_rules(loss, jrc.SavePrimitives("dot_general"))
    jax_s = jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)
    assert dots(lean, loss, W, X) == dots(jax_s, loss, W, X) == 0
    assert saved_bytes(lean, W, X) == saved_bytes(jax_s, W, X)
    assert rerun_operators(lean, loss, W, X)["tanh"] == 3
    assert_same(lean, loss, W, X)
    both = jrc.apply_rules(loss, jrc.SavePrimitives("dot_general") | jrc.SavePrimitives("tanh"))
    assert rerun_operators(both, loss, W, X)["tanh"] == 0


@pytest.mark.parametrize("call", ["rule", "tag"])
def test_single_operators_are_recomputed_and_the_rest_is_saved(call):
    def loss(w, x, op):
        for _ in range(3):
            x = op(x @ w) @ w
        return jnp.sum(x**2)

    plain = functools.partial(loss, op=jnp.tanh)
    if call == "rule":
        lean = jrc.apply_rules(plain, jrc.RecomputePrimitives("tanh"))
    else:
        lean = jrc.apply_rules(functools.partial(loss, op=jrc.recompute_op(jnp.tanh)))
    again = rerun_operators(lean, plain, W, X)
    assert again["tanh"] == 3 and again["dot_general"] == 0
    # Saved: the operand of each tanh, and the second product of each layer.
    # Plain: what tanh gave and what its derivative is, and the second product.
    assert saved_bytes(lean, W, X) < saved_bytes(plain, W, X)
    assert_same(lean, plain, W, X)


def test_a_composite_operator_is_recomputed_as_one():
    """gelu is ten equations; recomputed, only its operand is saved."""
    plain = functools.partial(layers, op=jax.nn.gelu)
    lean = jrc.apply_rules(functools.partial(layers, op=jrc.recompute_op(jax.nn.gelu)))
    again = rerun_operators(lean, plain, W, X)
    assert again["tanh"] == 3 and again["dot_general"] == 0
    # Three operands of gelu, and two values that the loss reads of the last result.
    assert saved_bytes(lean, W, X) <= 5 * ONE < saved_bytes(plain, W, X)
    assert_same(lean, plain, W, X)


@given(graph=graphs(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_random_graphs_rerun_exactly_the_operators_that_a_rule_names(graph, data):
    plain = functools.partial(graph, skip_dead=True)
    ops = sorted({graph.ops[i][0] for i in graph.live()} & set(UNARY))
    if not ops:
        return
    primitives = {"sin": "sin", "tanh": "tanh", "exp": "exp", "cos": "cos", "square": "square"}
    chosen = data.draw(st.sampled_from(ops))
    if chosen not in primitives:
        return
    lean = jrc.apply_rules(plain, jrc.RecomputePrimitives(primitives[chosen]))
    args = (W * 0.3, X * 0.3)
    one, two = (jax.grad(f, (0, 1))(*args) for f in (lean, plain))
    if all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(two)):
        assert largest_error(one, two) < 1e-5
    # Nothing else runs twice; the derivatives of some operators are counted with them.
    more = rerun_operators(lean, plain, *args, argnums=(0, 1))
    assert more["dot_general"] <= 0 and saved_bytes(lean, *args) <= saved_bytes(plain, *args) + 0
    twice = {name for name, n in more.items() if n > 0} - {"mul", "sub", "neg", "stop_gradient"}
    assert twice <= {primitives[chosen], "custom_jvp_call"}, more


def test_the_innermost_rule_wins():
    def inner(w, x):
        return jnp.sin(jnp.tanh(x @ w) @ w)

    def loss(w, x, middle):
        return jnp.sum(jnp.cos(middle(w, x) @ w))

    plain = functools.partial(loss, middle=inner)

    def count(middle, outer):
        lean = outer(functools.partial(loss, middle=middle))
        return compiled_products(lean, W, X) - compiled_products(plain, W, X)

    def again(f):
        return functools.partial(jrc.recompute, f, use_reentrant=False)

    def keep(f):
        return jrc.apply_rules(f, jrc.RecomputePrimitives("cos"))

    products = jrc.apply_rules(inner, jrc.SavePrimitives("dot_general"))
    assert count(inner, again) == 3
    # The inner function saves its products; only the outer product is recomputed.
    assert count(products, again) == 1
    assert count(jrc.keep_op(inner), again) == 1
    # The inner function recomputes one operator and saves the rest.
    one = jrc.apply_rules(inner, jrc.RecomputePrimitives("tanh"))
    assert count(one, again) == 1
    tanhs = rerun_operators(again(functools.partial(loss, middle=one)), plain, W, X)["tanh"]
    assert tanhs == 1
    # The outer function saves, the call inside recomputes.
    assert count(again(inner), keep) == 2
    # A tag that saves, in a call that is recomputed, in a function that saves.
    deep = lambda w, x: jnp.sin(jrc.keep_op(jnp.dot)(jnp.tanh(x @ w), w))  # noqa: E731
    assert count(again(deep), keep) == 1
    assert_same(again(functools.partial(loss, middle=one)), plain, W, X)


@pytest.mark.slow
@pytest.mark.parametrize("length", [4, 1])
def test_rules_and_tags_reach_into_loops_and_branches(length):
    def loss(w, x, op, dot):
        def step(c, _):
            c = op(dot(c, w))
            return jax.lax.cond(jnp.sum(c) > 1e6, jnp.sin, lambda c: op(dot(c, w)), c), None

        return jnp.sum(jax.lax.scan(step, x, None, length=length)[0] ** 2)

    plain = functools.partial(loss, op=jnp.tanh, dot=jnp.dot)
    tagged = functools.partial(loss, op=jnp.tanh, dot=jrc.keep_op(jnp.dot))
    for lean in (
        jrc.apply_rules(plain, jrc.SavePrimitives("dot_general")),
        functools.partial(jrc.recompute, tagged, use_reentrant=False),
    ):
        assert dots(lean, plain, W, X) <= 0
        assert largest_error(jax.grad(lean)(W, X), jax.grad(plain)(W, X)) < 1e-6
    # Without the tag all products of every step are recomputed.
    assert dots(functools.partial(jrc.recompute, plain), plain, W, X) >= 2 * length
    tags = jrc.apply_rules(functools.partial(loss, op=jrc.recompute_op(jnp.tanh), dot=jnp.dot))
    rule = jrc.apply_rules(plain, jrc.RecomputePrimitives("tanh"))
    for lean in (tags, rule):
        # A branch that reads a recomputed value is recomputed too, with its product.
        assert dots(lean, plain, W, X) == length
        assert rerun_operators(lean, plain, W, X)["tanh"] >= 2 * length
        assert saved_bytes(lean, W, X) <= saved_bytes(plain, W, X)
        assert largest_error(jax.grad(lean)(W, X), jax.grad(plain)(W, X)) < 1e-6


def test_marks_inside_a_loop_are_saved_for_every_step():
    def loss(w, x):
        step = lambda c, _: (jrc.mark(jnp.tanh(jnp.sin(c @ w) @ w), "h"), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, None, length=5)[0] ** 2)

    lean = jrc.apply_rules(loss, jrc.Save("h"))
    assert saved_bytes(lean, W, X) <= 6 * ONE
    assert largest_error(jax.grad(lean)(W, X), jax.grad(loss)(W, X)) < 1e-6
    # The second product is the operand of the saved tanh; the first one is recomputed.
    assert dots(lean, loss, W, X) == 5


def test_keep_inside_segments():
    plain = functools.partial(layers, op=jnp.sin)

    def count(**options):
        return dots(jrc.recompute_segments(plain, MARKS, **options), plain, W, X)

    assert count() == 3
    assert count(keep=jrc.SavePrimitives("dot_general")) == 0
    # Only sin is recomputed, and no product.
    assert count(keep=jrc.RecomputePrimitives("sin")) == 0
    lean = jrc.recompute_segments(plain, ["h2"], keep=jrc.Save("h0"))
    assert "h0" in jrc.find_segments(plain, ["h2"], W, X, keep=jrc.Save("h0")).held
    assert_same(lean, plain, W, X)


def test_segments_report_what_rules_save():
    plain = functools.partial(layers, op=jnp.tanh)
    rule = jrc.SavePrimitives("dot_general")
    cut = jrc.find_segments(plain, ["h1"], W, X, keep=rule)
    assert cut.segments[0].rerun == ("h0",)
    assert [name.partition(":")[0] for name in cut.held] == ["dot_general", "h1"]
    # Two products, and h1, which is computed from the second one, outside the region.
    assert cut.segments[0].held_bytes == 3 * ONE
    assert jrc.find_segments(plain, ["h1"], W, X, keep=jrc.Save("h0")).segments[0].rerun == ()


PATTERNS = {
    "first product of each segment": ({"main_ops": ["dot_general"], "num": 1}, 2),
    "all products": ({"main_ops": ["dot_general"], "num": -1}, 4),
    "none": ({"main_ops": ["dot_general"], "num": 0}, 0),
    "before tanh": ({"main_ops": ["dot_general"], "suf_ops": ["add", "tanh"], "num": -1}, 2),
    "behind sin": ({"pre_ops": ["sin"], "main_ops": ["dot_general"]}, 2),
    "in the middle": (
        {"pre_ops": ["sin"], "main_ops": ["dot_general", "add"], "suf_ops": ["tanh"], "num": 2},
        2,
    ),
    "no such run": ({"main_ops": ["dot_general"], "suf_ops": ["cos"]}, 0),
}


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=4)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_save_runs_of_operators(name):
    pattern, held = PATTERNS[name]

    def loss(w, x):
        for i in range(2):
            x = jnp.sin(x @ w)
            x = jrc.mark(jnp.cos(jnp.tanh(x @ w + w)), f"block_{i}")
        return jnp.sum(x)

    blocks = ["block_0", "block_1"]
    lean = jrc.recompute_segments(loss, blocks, keep_patterns=[pattern])
    everything = dots(jrc.recompute_segments(loss, blocks), loss, W, X)
    assert dots(lean, loss, W, X) == everything - held
    assert_same(lean, loss, W, X)
    cut = jrc.find_segments(loss, blocks, W, X, keep_patterns=[pattern])
    rerun = [name for segment in cut.segments for name in segment.rerun]
    assert sum(name.startswith("dot_general") for name in rerun) == everything - held


def test_patterns_are_checked():
    def cut(pattern):
        return jrc.recompute_segments(layers, MARKS, keep_patterns=pattern)

    with pytest.raises(TypeError, match="keep_patterns must be a list of dicts, got"):
        cut({"main_ops": ["tanh"]})
    with pytest.raises(TypeError, match=r"keep_patterns\[0\] must be a dict, got 'tanh'"):
        cut(["tanh"])
    with pytest.raises(ValueError, match=r"must have keys from .*got 'main_op'.*mean 'main_ops'"):
        cut([{"main_op": ["tanh"]}])
    with pytest.raises(TypeError, match=r"\['suf_ops'\] must be a list .*, got 'tanh'"):
        cut([{"main_ops": ["tanh"], "suf_ops": "tanh"}])
    with pytest.raises(ValueError, match=r"\['main_ops'\] must name at least one operator"):
        cut([{"pre_ops": ["tanh"]}])
    with pytest.raises(ValueError, match=r"\['num'\] must be a whole number >= -1, got -2"):
        cut([{"main_ops": ["tanh"], "num": -2}])


def test_rules_are_values():
    rule = jrc.Save("a", "b") | jrc.SavePrimitives("dot_general") | jrc.Offload("c")
    same = jrc.Save("a", "b") | (jrc.SavePrimitives("dot_general") | jrc.Offload("c"))
    assert rule == same and hash(rule) == hash(same) and rule != jrc.Save("a")
    assert repr(rule) == (
        "Save('a', 'b') | SavePrimitives('dot_general') | Offload('c', to='pinned_host')"
    )
    assert eval(repr(rule), vars(jrc)) == rule
    with pytest.raises(AttributeError):
        jrc.Save("a").names = ("b",)


def test_rules_are_checked():
    with pytest.raises(ValueError, match="names must contain at least one mark, got none"):
        jrc.Save()
    with pytest.raises(TypeError, match=r"names must be strings, each naming a primitive, got \["):
        jrc.SavePrimitives(["dot_general"])
    with pytest.raises(ValueError, match="got 'tanh' in both, to be saved and recomputed at once"):
        jrc.SavePrimitives("tanh") | jrc.RecomputePrimitives("tanh", "exp")
    with pytest.raises(ValueError, match="'h' in both, to be saved on the device and offloaded"):
        jrc.Offload("h") | jrc.Save("h")
    with pytest.raises(ValueError, match="to must be the same in all rules that are joined"):
        jrc.Offload("a") | jrc.Offload("b", to="unpinned_host")
    with pytest.raises(TypeError):
        jrc.Save("a") | "b"
    for call in (jrc.apply_rules, functools.partial(jrc.recompute_segments, checkpoints=["h0"])):
        with pytest.raises(TypeError, match="keep must be a rule or None, got str 'h0'"):
            call(layers, keep="h0")
    plain = functools.partial(layers, op=jnp.tanh)
    with pytest.raises(
        ValueError,
        match=r"marks of `layers` within its reach \('h0', 'h1', 'h2'\), got 'h9'",
    ):
        jrc.apply_rules(plain, jrc.Save("h9"))(W, X)
    with pytest.raises(ValueError, match="operators of `layers` .*dot_general.*got 'matmul'"):
        jrc.apply_rules(plain, jrc.SavePrimitives("matmul"))(W, X)
    for tag in (jrc.keep_op, jrc.recompute_op):
        with pytest.raises(TypeError, match="fn must be an operator, a function"):
            tag(W)
    with pytest.raises(TypeError, match="fn must be a function, got"):
        jrc.apply_rules(W)


def test_tags_change_nothing_elsewhere():
    for tag in (jrc.keep_op, jrc.recompute_op):
        op = tag(lambda x, scale, *, mode: {"y": jnp.sin(x) * scale, "mode": mode, "none": None})
        out = op(X, 2, mode="train")
        assert out["mode"] == "train" and out["none"] is None
        assert bit_equal(out["y"], jnp.sin(X) * 2)
        assert (
            largest_error(jax.jit(lambda x, op=op: op(x, 2, mode="t")["y"])(X), jnp.sin(X) * 2)
            < 1e-6
        )
        plain, tagged = jnp.sin, tag(jnp.sin)
        for f in (
            jax.grad,
            jax.hessian,
            lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x])),
        ):
            one, two = (f(lambda x, g=g: jnp.sum(g(x) ** 2))(X) for g in (plain, tagged))
            assert largest_error(one, two) < 1e-6
        assert tagged.__name__ == "sin"


@pytest.mark.slow
def test_tagged_operators_with_closures_integers_and_keys():
    def loss(w, key, tag):
        rows = jnp.arange(4)

        def drop(rows, key):
            return jnp.tanh(w[rows] @ w) * jax.random.bernoulli(key, 0.5, (4, 4))

        return jnp.sum(tag(drop)(rows, key) ** 2)

    plain = functools.partial(loss, tag=lambda f: f)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        for tag in (jrc.keep_op, jrc.recompute_op):
            tagged = functools.partial(loss, tag=tag)
            for lean in (functools.partial(jrc.recompute, tagged), jrc.apply_rules(tagged)):
                grads = [jax.jit(jax.grad(f))(W, key) for f in (lean, plain)]
                assert largest_error(*grads) < 1e-6


def test_a_value_read_early_and_late_is_recomputed_without_a_cycle():
    """A group that is read behind its own result stays a program that can be ordered."""

    def loss(w, x):
        early = jnp.tanh(x @ w)
        near = jnp.sin(early @ w)
        other = jnp.tanh(near @ w)
        far = early * other
        return jnp.sum(far @ w + other.T)

    lean = jrc.apply_rules(loss, jrc.RecomputePrimitives("tanh"))
    assert rerun_operators(lean, loss, W, X)["dot_general"] == 0
    assert_same(lean, loss, W, X)


def test_offload_on_cpu_warns_and_is_in_the_program():
    plain = functools.partial(layers, op=jnp.sin)
    lean = jrc.recompute_segments(plain, MARKS, keep=jrc.Offload(*MARKS[:2]))
    with pytest.warns(UserWarning, match=r"Offload\(to='pinned_host'\) moves nothing on CPU"):
        text = str(jax.make_jaxpr(jax.grad(lean))(W, X))
    # Both boundaries go to the host, each once, and come back for their segment.
    assert text.count("MemorySpace.Host") == 2 and text.count("MemorySpace.Device") == 2
    with pytest.warns(UserWarning):
        assert largest_error(jax.jit(jax.grad(lean))(W, X), jax.grad(plain)(W, X)) < 1e-6
    missing = jrc.recompute_segments(plain, MARKS, keep=jrc.Offload("h0", to="moon"))
    with pytest.raises(ValueError, match=r"must name a memory kind of cpu .*, got 'moon'"):
        missing(W, X)
    inner = jrc.apply_rules(plain, jrc.Offload("h1"))
    with pytest.warns(UserWarning):
        text = str(jax.make_jaxpr(jax.grad(inner))(W, X))
    assert text.count("MemorySpace.Host") == 1


def custom_relus():
    """Functions that are no relu but look like one: by name, by value, by both."""

    @jax.jit
    def relu(x):
        return jnp.where(x > 0, x, 0.1 * x)

    leaky = relu

    @jax.custom_jvp
    def relu(x):
        return jnp.maximum(x, 0)

    relu.defjvp(lambda x, d: (jnp.maximum(x[0], 0), d[0]))
    return {"leaky": leaky, "straight through": relu, "real": jax.nn.relu}


@pytest.mark.parametrize("name", custom_relus())
def test_what_looks_like_relu_keeps_its_own_derivative(name):
    plain = functools.partial(layers, op=custom_relus()[name])
    tagged = functools.partial(layers, op=jrc.keep_op(custom_relus()[name]))
    want = jax.grad(plain)(W, X)
    for lean in (
        jrc.recompute_segments(plain, MARKS),
        jrc.apply_rules(plain, jrc.Save(*MARKS)),
        functools.partial(jrc.recompute, tagged),
    ):
        assert largest_error(jax.grad(lean)(W, X), want) < 1e-6


def odd_operators():
    @jax.custom_vjp
    def scaled(x):
        return jnp.sin(x) * 2

    scaled.defvjp(lambda x: (jnp.sin(x) * 2, x), lambda x, g: (jnp.cos(x) * 2 * g,))
    return {
        "custom_vjp": scaled,
        "recompute": lambda x: jrc.recompute(jnp.sin, x),
        "scan of custom_vjp": lambda x: jax.lax.scan(
            lambda c, _: (scaled(jnp.tanh(c)), None), x, None, length=2
        )[0],
        "cond": lambda x: jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x),
        "differentiable once": lambda x: jax.scipy.special.gammainc(x * x + 2, x * x + 1),
        "complex": lambda x: jnp.abs(jnp.fft.fft(jnp.sin(x)) * (1 + x)),
        "top_k": lambda x: jax.lax.top_k(x, 4)[0],
        "eigenvalues": lambda x: jnp.linalg.eigh(x + x.T)[0][None] + x,
    }


@pytest.mark.exhaustive(after=6)
@pytest.mark.slow(after=2)
@pytest.mark.parametrize("name", odd_operators())
def test_odd_operators_under_every_rule(name):
    op = odd_operators()[name]

    def loss(w, x, op):
        h = jrc.mark(op(jnp.tanh(x @ w)), "h")
        return jnp.sum(jnp.sin(h @ w) * h)

    plain = functools.partial(loss, op=op)
    leans = {
        "save": jrc.apply_rules(plain, jrc.Save("h")),
        "segments": jrc.recompute_segments(plain, ["h"]),
        "rerun": jrc.apply_rules(plain, jrc.RecomputePrimitives("tanh")),
        "keep_op": functools.partial(
            jrc.recompute, functools.partial(loss, op=jrc.keep_op(op)), use_reentrant=False
        ),
        "recompute_op": jrc.apply_rules(functools.partial(loss, op=jrc.recompute_op(op))),
        "inner": functools.partial(
            jrc.recompute, jrc.apply_rules(plain, jrc.RecomputePrimitives("tanh"))
        ),
    }
    xs = jnp.stack([X, -X])
    want = jax.grad(plain)(W, X)
    batched = jax.grad(lambda w: jnp.mean(jax.vmap(plain, (None, 0))(w, xs)))(W)
    for policy, lean in leans.items():
        assert largest_error(jax.grad(lean)(W, X), want) < 1e-5, policy
        got = jax.grad(lambda w, f=lean: jnp.mean(jax.vmap(f, (None, 0))(w, xs)))(W)
        assert largest_error(got, batched) < 1e-5, policy


@pytest.mark.parametrize("name", ["top_k", "sort"])
def test_integer_results_are_saved_too(name):
    """The derivative of top_k reads the indices that it returned."""

    def loss(w, x):
        h = x @ w
        values = jax.lax.top_k(h, 2)[0] if name == "top_k" else jax.lax.sort_key_val(h, x)[1]
        return jnp.sum(jnp.sin(values))

    lean = jrc.apply_rules(loss, jrc.SavePrimitives(name))
    again = rerun_operators(lean, loss, W, X)
    assert again["dot_general"] == 0 and again[name] == 0
    assert largest_error(jax.grad(lean)(W, X), jax.grad(loss)(W, X)) < 1e-6


def test_a_rule_for_a_value_wins_over_one_for_its_operator():
    plain = functools.partial(layers, op=jnp.tanh)
    both = jrc.apply_rules(plain, jrc.Save(*MARKS) | jrc.RecomputePrimitives("tanh"))
    assert rerun_operators(both, plain, W, X)["tanh"] == 0 == dots(both, plain, W, X)


def test_an_operator_named_like_its_primitive_is_rerun_once():
    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.linalg.eigh(x @ w + w.T @ x.T)[0]))

    lean = jrc.apply_rules(loss, jrc.RecomputePrimitives("eigh"))
    assert rerun_operators(lean, loss, W, X)["eigh"] == 1


def test_tags_inside_a_tag_win():
    def body(w, x, dot):
        return jnp.sin(dot(jnp.sin(dot(x, w)), w))

    def loss(w, x, body):
        return jnp.sum(jnp.cos(body(w, x) @ w))

    plain = functools.partial(loss, body=functools.partial(body, dot=jnp.dot))
    kept = functools.partial(body, dot=jrc.keep_op(jnp.dot))
    again = jrc.apply_rules(functools.partial(loss, body=jrc.recompute_op(kept)))
    whole = jrc.recompute_op(functools.partial(body, dot=jnp.dot))
    assert dots(jrc.apply_rules(functools.partial(loss, body=whole)), plain, W, X) == 2
    assert dots(again, plain, W, X) == 0
    assert largest_error(jax.grad(again)(W, X), jax.grad(plain)(W, X)) < 1e-6


def test_rules_that_cannot_reach_are_refused():
    def hidden(w, x):
        return jnp.sum(jax.checkpoint(lambda w, x: jrc.mark(jnp.tanh(x @ w), "h") @ w)(w, x))

    with pytest.raises(ValueError, match="got 'h', which stands inside a jax.checkpoint region"):
        jrc.apply_rules(hidden, jrc.Save("h"))(W, X)
    plain = functools.partial(layers, op=jax.nn.gelu)
    with pytest.raises(ValueError, match="writes inline, such as gelu.*reached by jrc.keep_op"):
        jrc.apply_rules(plain, jrc.SavePrimitives("gelu"))(W, X)
    with pytest.raises(TypeError, match="recompute_collectives must be True or False, got 'no'"):
        jrc.apply_rules(plain, recompute_collectives="no")
    with pytest.raises(TypeError, match="keep must be a rule or None"):
        jrc.apply_rules(plain, jrc.remat.Rule())


@pytest.mark.slow
@pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False), reason="jax.checkpoint itself leaves its names behind"
)
@pytest.mark.parametrize("tagged", [False, True])
def test_saved_values_leave_no_tracer_behind(tagged):
    op = jrc.keep_op(lambda x: jnp.tanh(jnp.sin(x) @ W)) if tagged else jnp.tanh
    keep = None if tagged else jrc.SavePrimitives("tanh")
    lean = jrc.recompute_segments(lambda w, x: layers(w, x, op), MARKS[1:], keep=keep)
    # Each check collects garbage, and what other tests left in a worker is none.
    gc.collect()
    gc.freeze()
    with jax.checking_leaks():
        jax.jit(jax.grad(lean)).lower(W, X)


def EAGER(fn):  # noqa: N802
    return fn


# What the gradient runs once more than without the tag: the operator's own work.
ALONE = {
    "relu": (jax.nn.relu, {}),
    "tanh": (jnp.tanh, {"tanh": 1}),
    "silu": (jax.nn.silu, {"logistic": 1}),
    "gelu": (jax.nn.gelu, {"tanh": 1, "integer_pow": 1}),
    "softmax": (jax.nn.softmax, {"exp": 1, "reduce_max": 1}),
}


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("tanh", EAGER),
        ("relu", jax.jit),
        ("gelu", EAGER),
        ("softmax", jax.jit),
        ("silu", EAGER),
        ("relu", EAGER),
        ("tanh", jax.jit),
        ("silu", jax.jit),
        ("gelu", jax.jit),
        ("softmax", EAGER),
    ],
)
def test_recompute_op_acts_alone(name, around):
    """Only the operand is saved of it, and the result by the product that reads it."""
    op, counts = ALONE[name]

    def loss(w, x, op):
        return jnp.sum(op(x @ w) @ w)

    plain = functools.partial(loss, op=op)
    lean = functools.partial(loss, op=jrc.recompute_op(op))
    more = rerun_operators(around(lean), around(plain), W, X)
    assert {key: more[key] for key in counts} == counts and more["dot_general"] == 0
    assert saved_bytes(lean, W, X) == 2 * ONE <= saved_bytes(plain, W, X)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.jit(jax.hessian(f))):
        got, want = (transform(around(f))(W, X) for f in (lean, plain))
        assert largest_error(got, want) < 1e-5
    # In another region the gradients are equal, and no further product is recomputed.
    for region in (jax.checkpoint, lambda f: functools.partial(jrc.recompute, f)):
        grads = [jax.grad(region(f), (0, 1))(W, X) for f in (lean, plain)]
        assert largest_error(*grads) < 1e-6
        assert (
            rerun_operators(region(lean), region(plain), W, X, argnums=(0, 1))["dot_general"] == 0
        )


def test_a_tag_without_effect_is_reported():
    def loss(w, x):
        return jnp.sum(jrc.keep_op(jnp.tanh)(x @ w) @ w)

    (text,) = [t for t in jrc.explain(loss, W, X).warnings if "keep_op" in t]
    assert text.startswith("jrc.keep_op or jrc.apply_rules at test_keep.py:")
    assert "has no effect: nothing around or inside it is recomputed" in text
    for lean in (
        functools.partial(jrc.recompute, loss),
        jrc.apply_rules(loss, jrc.SavePrimitives("dot_general")),
        jrc.recompute_segments(lambda w, x: jrc.mark(loss(w, x), "h") * 1, ["h"]),
    ):
        assert not [t for t in jrc.explain(lean, W, X).warnings if "keep_op" in t]


def test_rules_reach_into_branches_for_platforms():
    """The branch of another platform is not compiled, with a rule inside of it neither."""

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.tanh(x_ref[...])

    def tpu(x):
        x = jax.lax.stop_gradient(jnp.tanh(x))
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def loss(w, x):
        h = jax.lax.platform_dependent(jnp.sin(x @ w), tpu=tpu, default=jnp.tanh)
        return jnp.sum(h @ w)

    want = jax.jit(jax.grad(loss))(W, X)
    for lean in (
        jrc.apply_rules(loss, jrc.SavePrimitives("tanh")),
        jrc.apply_rules(loss, jrc.RecomputePrimitives("tanh")),
        jrc.recompute_segments(
            lambda w, x: jrc.mark(loss(w, x), "h") * 1, ["h"], keep=jrc.SavePrimitives("tanh")
        ),
    ):
        assert largest_error(jax.jit(jax.grad(lean))(W, X), want) < 1e-6
        assert "branches_platforms" in str(jax.make_jaxpr(lean)(W, X))
