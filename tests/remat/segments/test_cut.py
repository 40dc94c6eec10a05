"""The cut against an independent statement of the rule, over random graphs."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jrc
from jrc._jaxpr import Reads, primitives_where, trace, walk
from tests.remat.graphs import graphs
from tests.remat.measure import bit_equal, rerun_operators

W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
X = jnp.linspace(-0.4, 0.6, 16).reshape(4, 4)


def naive_partition(boundaries, position, reader):
    ends = sorted(position[b] for b in boundaries)
    return [(s, e + 1) for s, e in zip([0, *(e + 1 for e in ends)], ends, strict=False)], []


def naive_fluid(boundaries, position, reader):
    order = sorted(boundaries, key=position.get)
    if len(order) == 1:
        end = position[order[0]]
        return ([(0, end + 1)] if end > 0 else []), []
    segments, short = naive_pairs(order, position, reader)
    if segments and segments[0][0] > 0:
        segments.insert(0, (0, segments[0][0]))
    return segments, short


def naive_pass(boundaries, position, reader):
    order = sorted(boundaries, key=position.get)
    segments, short = naive_pairs(order, position, reader)
    return [(0, position[order[0]] + 1), *segments], short


def naive_pairs(order, position, reader):
    segments, short = [], []
    for i in range(len(order) - 1):
        start, stop = reader[order[i]], position[order[i + 1]] + 1
        if stop - start >= 2:
            segments.append((start, stop))
        else:
            short.append((f"v{order[i]}", f"v{order[i + 1]}"))
    return segments, short


NAIVE = {"partition": naive_partition, "fluid": naive_fluid, "pass": naive_pass}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("rule", NAIVE)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_cut_is_the_stated_rule(rule, data):
    """Segments, crossing and recomputed values, from the operators alone."""
    graph = data.draw(graphs())
    chosen = data.draw(st.sets(st.integers(0, len(graph.ops) - 1), min_size=1))
    asked = data.draw(st.permutations(sorted(chosen)))
    cut = jrc.find_segments(graph, [f"v{i}" for i in asked], W, X, rule=rule)

    # The sum at the end is one more equation, which reads the last value.
    live, end = graph.live(), len(graph.ops)
    position = {op: i for i, op in enumerate([*live, end])}
    readers = {
        i: [r for r in live if i + 2 in graph.ops[r][1]] + ([end] if i == end - 1 else [])
        for i in live
    }
    boundaries = [b for b in chosen if b in live]
    segments, short = [], []
    if boundaries:
        reader = {i: position[min(readers[i])] for i in live}
        segments, short = NAIVE[rule](boundaries, position, reader)

    assert sorted(cut.unused) == sorted(f"v{i}" for i in chosen if i not in live)
    assert list(cut.too_short) == short and len(cut.segments) == len(segments)
    crossing = []
    for (start, stop), segment in zip(segments, cut.segments, strict=True):
        ops = [*live, end][start:stop]
        leaving = [i for i in ops if set(readers[i]) - set(ops)]
        inner = [i for i in ops if i in boundaries]
        assert segment.equations == tuple(f"v{i}" for i in ops)
        assert segment.boundary == tuple(f"v{i}" for i in inner)
        assert segment.crossing == tuple(f"v{i}" for i in leaving if i not in inner)
        again = [i for i in ops if i not in leaving and i not in inner]
        assert segment.recomputed == tuple(f"v{i}" for i in again)
        assert set(segment.rerun) <= set(segment.equations)
        crossing += segment.crossing
    assert list(cut.crossing) == crossing


# Cuts of one chain, written out. dot and tanh alternate; names are the marks of both.
def chain(ws, x):
    for i, w in enumerate(ws):
        x = jrc.mark(jrc.mark(x @ w, f"dot_{i}") + 0.0, f"add_{i}")
        x = jrc.mark(jnp.tanh(x), f"tanh_{i}")
    return jnp.mean(x)


GOLDEN = {
    ("tanh_0",): [("dot_0", "add_0")],
    ("tanh_0", "tanh_1"): [("dot_0", "add_0"), ("dot_1", "add_1")],
    ("tanh_1",): [("dot_0", "add_0", "tanh_0", "dot_1", "add_1")],
    ("dot_1",): [("dot_0", "add_0", "tanh_0")],
    ("add_0", "dot_1"): [("dot_0",), ("tanh_0",)],
    ("dot_0",): [()],
}


@pytest.mark.parametrize("boundaries", GOLDEN)
def test_golden_recomputed(boundaries):
    ws = [W] * 3
    cut = jrc.find_segments(chain, list(boundaries), ws, X)
    assert [segment.recomputed for segment in cut.segments] == GOLDEN[boundaries]
    assert cut.held == boundaries and cut.crossing == () and cut.unused == ()


def test_golden_rerun():
    """A segment that ends in tanh does not recompute its operand; one that ends in sin does."""
    cut = jrc.find_segments(chain, ["tanh_0", "tanh_1"], [W] * 3, X)
    assert cut.segments[1].rerun == ()

    def two(w, x):
        x = jrc.mark(jnp.tanh(jrc.mark(jnp.sin(jrc.mark(x @ w, "a")), "b") @ w), "c")
        y = jrc.mark(jnp.sin(jrc.mark(x @ w, "d")), "e")
        return jnp.sum(y)

    cut = jrc.find_segments(two, ["c", "e"], W, X)
    assert cut.segments[0].rerun == ("a", "b")
    assert cut.segments[1].rerun == ("d",)


def test_marks_in_nested_jit_count_as_inline():
    block = jax.jit(lambda w, x: jrc.mark(jnp.sin(x @ w), "block"))

    def loss(w, x):
        return jnp.sum(jax.jit(lambda x: block(w, block(w, x)))(x))

    cut = jrc.find_segments(loss, ["block"], W, X)
    assert [segment.boundary for segment in cut.segments] == [("block",), ("block#2",)]
    only = jrc.find_segments(loss, ["block#2"], W, X)
    assert [segment.boundary for segment in only.segments] == [("block#2",)]
    assert only.segments[0].recomputed[1] == "block"


def test_pytree_mark_ends_at_its_last_producer():
    def loss(w, x):
        a, b = jrc.mark((jnp.sin(x @ w), jnp.cos(x)), "pair")
        return jnp.sum(a * b)

    cut = jrc.find_segments(loss, ["pair"], W, X)
    assert cut.held == ("pair",) and len(cut.segments[0].equations) == 3
    assert cut.segments[0].held_bytes == 2 * 16 * 4


def test_boundaries_that_cut_nothing_are_reported():
    def loss(w, x):
        jrc.mark(jnp.sin(x), "dead")
        return jnp.sum(jrc.mark(jrc.mark(x, "input") @ w, "out"))

    cut = jrc.find_segments(loss, ["dead", "input", "out"], W, X)
    assert cut.unused == ("dead", "input") and len(cut.segments) == 1
    assert "unused: dead, input" in str(cut)


def test_table_shows_every_segment():
    text = str(jrc.find_segments(chain, ["dot_1", "tanh_1"], [W] * 3, X))
    for word in ("dot_1", "tanh_1", "(in no segment)", "re-run (rule)", "bytes held"):
        assert word in text
    assert len(text.splitlines()) == 2 + 3


def test_segmentation_is_a_value():
    first, second = (jrc.find_segments(chain, ["dot_1"], [W] * 3, X) for _ in range(2))
    assert first == second and hash(first) == hash(second)


def test_a_value_with_two_marks_has_the_name_that_was_asked_for():
    def loss(w, x):
        return jnp.sum(jrc.mark(jrc.mark(jnp.sin(x @ w), "a"), "b") * 2)

    for name in ("a", "b"):
        cut = jrc.find_segments(loss, [name], W, X)
        assert cut.held == cut.segments[0].boundary == (name,) and cut.crossing == ()
    assert jrc.find_segments(loss, ["b", "a"], W, X).segments[0].boundary == ("a", "b")


def unit_net(w, b1, b2, x):
    """Paddle's unit test: matmul, two additions, mean."""
    y = jrc.mark(x @ w, "matmul")
    y = jrc.mark(y + jnp.broadcast_to(b1[None], y.shape), "b1")
    y = jrc.mark(y + jnp.broadcast_to(b2[None], y.shape), "b2")
    return jnp.mean(y)


# Measured with Paddle: recomputed values for each choice of boundaries.
PADDLE = {
    ("b1",): ("matmul",),
    ("b2",): ("matmul", "b1"),
    ("matmul", "b2"): ("b1",),
    ("matmul", "b1"): (),
    ("b1", "b2"): (),
    ("matmul",): (),
    ("matmul", "b1", "b2"): (),
    ("b1", "unknown"): ("matmul",),
    ("b1", "b1"): ("matmul",),
    (): (),
}


@pytest.mark.parametrize("boundaries", PADDLE)
def test_paddle_s_unit_net(boundaries):
    args = (W, W[0], W[1], X)
    cut = jrc.find_segments(unit_net, boundaries, *args, rule="fluid")
    assert sum((segment.recomputed for segment in cut.segments), ()) == PADDLE[boundaries]
    assert cut.unused == tuple(b for b in boundaries if b == "unknown")
    if boundaries == ("matmul", "b1"):
        assert cut.too_short == (("matmul", "b1"),)
    lean = jrc.recompute_segments(unit_net, boundaries, rule="fluid")
    grads = [jax.grad(f, argnums=(0, 1, 2, 3))(*args) for f in (lean, unit_net)]
    assert bit_equal(*grads)


@pytest.mark.parametrize(
    "name", sorted(primitives_where(lambda facts: facts.derivative_reads == Reads.RESULT))
)
def test_own_result_operators_are_differentiated_without_their_argument(name):
    """JAX itself is asked: the argument must not be among what the derivative keeps."""
    operator = {"tanh": jnp.tanh, "logistic": jax.nn.sigmoid, "exp": jnp.exp, "exp2": jnp.exp2,
                "sqrt": jnp.sqrt, "cbrt": jnp.cbrt}[name]  # fmt: skip
    x = jnp.linspace(1.0, 2.0, 5)
    assert name in [eqn.primitive.name for eqn, _ in walk(jax.make_jaxpr(operator)(x))]
    kept = jax.make_jaxpr(lambda x: jax.tree.leaves(jax.vjp(operator, x)[1]))(x)
    traced = trace(lambda x: jax.tree.leaves(jax.vjp(operator, x)[1]), (x,), {}).program
    (given,) = kept.invars
    assert given not in kept.outvars
    readers = traced.consumers[traced.jaxpr.invars[0]]
    assert len(readers) == 1  # only the operator reads it


def chained(ws, x):
    for i, w in enumerate(ws):
        x = jrc.mark(jnp.exp(jnp.tanh(jnp.sin(x @ w) @ w)).reshape(-1, 4), f"b{i}")
    return jnp.sum(x)


def test_of_a_chain_of_own_result_operators_the_last_is_left_outside():
    cut = jrc.find_segments(chained, ["b0", "b1"], [W] * 3, X)
    names = [name.partition(":")[0] for name in cut.segments[0].rerun]
    assert names == ["dot_general", "sin", "dot_general"] or names[-1] == "tanh"
    assert cut.crossing == ()


def test_a_pytree_mark_with_a_dead_part_cuts_at_its_last_live_one():
    def loss(w, x):
        for i in range(3):
            q = jnp.sin(x @ w)
            x, _ = jrc.mark((q, jnp.sum(jnp.cos(q))), f"b{i}")
        return jnp.sum(x)

    cut = jrc.find_segments(loss, ["b0", "b1"], W, X)
    assert [s.boundary for s in cut.segments] == [("b0",), ("b1",)]
    assert cut.unused == cut.crossing == () and cut.held == ("b0", "b1")


def test_equations_without_results_have_a_name():
    def loss(w, x):
        h = jrc.mark(jnp.sin(x @ w), "h")
        jax.debug.print("h")
        return jnp.sum(jrc.mark(jnp.sin(h @ w), "g"))

    cut = jrc.find_segments(loss, ["h", "g"], W, X)
    assert any(name.startswith("debug_") for name in cut.segments[1].equations) and str(cut)


def test_rerun_looks_into_nested_calls():
    """The dot that feeds `jnp.where` is no part of the derivative, its mask is."""

    def loss(w, x, key):
        for i in range(2):
            h = jnp.sin(x @ w) @ w
            x = jrc.mark(jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0), f"d{i}")
        return jnp.sum(x * x)

    args = (W, X, jax.random.key(0))
    cut = jrc.find_segments(loss, ["d0", "d1"], *args)
    dots = [sum("dot" in name for name in s.rerun) for s in cut.segments]
    lean = jrc.recompute_segments(loss, ["d0", "d1"])
    assert dots == [1, 1] and rerun_operators(lean, loss, *args)["dot_general"] == 2
