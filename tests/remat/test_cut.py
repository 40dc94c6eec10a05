"""The cut against an independent statement of the rule, over random graphs."""

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jrc
from tests.remat.graphs import graphs

W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
X = jnp.linspace(-0.4, 0.6, 16).reshape(4, 4)


def naive_partition(graph, boundaries):
    """The rule in its own words, over operator numbers: segments and what crosses out of each."""
    live = graph.live()
    ends = sorted(b for b in boundaries if b in live)
    segments, start = [], 0
    for end in [*ends, len(graph.ops)]:
        segments.append([i for i in live if start <= i <= end])
        start = end + 1
    where = {i: s for s, segment in enumerate(segments) for i in segment}
    crossing = []
    for s, segment in enumerate(segments[:-1]):
        readers = {
            i: [r for r in live if i + 2 in graph.ops[r][1] and where[r] != s] for i in segment
        }
        last = len(graph.ops) - 1
        crossing.append([i for i in segment if (readers[i] or i == last) and i != ends[s]])
    return ends, segments, crossing


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_partition_is_the_stated_rule(data):
    graph = data.draw(graphs())
    chosen = data.draw(st.sets(st.integers(0, len(graph.ops) - 1), min_size=1))
    ends, segments, crossing = naive_partition(graph, chosen)
    cut = jrc.find_segments(
        graph, [f"v{i}" for i in data.draw(st.permutations(sorted(chosen)))], W, X
    )

    assert cut.unused == tuple(f"v{i}" for i in sorted(chosen) if i not in ends)
    assert len(cut.segments) == len(ends) + 1
    for s, segment in enumerate(cut.segments):
        names = tuple(f"v{i}" for i in segments[s])
        if s == len(ends):
            assert segment.equations[: len(names)] == names and not segment.recompute
            continue
        assert segment.boundary == (f"v{ends[s]}",)
        assert segment.equations == names
        assert segment.crossing == tuple(f"v{i}" for i in crossing[s])
        held = {ends[s], *crossing[s]}
        assert segment.recomputed == tuple(f"v{i}" for i in segments[s] if i not in held)
        assert set(segment.rerun) <= set(names)


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
    assert [segment.recomputed for segment in cut.segments[:-1]] == GOLDEN[boundaries]
    assert cut.held == boundaries and cut.crossing == () and cut.unused == ()


def test_golden_rerun():
    """A segment that ends in tanh does not re-run the dot that feeds it; one in sin does."""
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
    import jax

    block = jax.jit(lambda w, x: jrc.mark(jnp.sin(x @ w), "block"))

    def loss(w, x):
        return jnp.sum(jax.jit(lambda x: block(w, block(w, x)))(x))

    cut = jrc.find_segments(loss, ["block"], W, X)
    assert [segment.boundary for segment in cut.segments] == [("block",), ("block#2",), ()]
    only = jrc.find_segments(loss, ["block#2"], W, X)
    assert [segment.boundary for segment in only.segments] == [("block#2",), ()]
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
    assert cut.unused == ("dead", "input") and len(cut.segments) == 2
    assert "unused: dead, input" in str(cut)


def test_table_shows_every_segment():
    text = str(jrc.find_segments(chain, ["dot_1", "tanh_1"], [W] * 3, X))
    for word in ("dot_1", "tanh_1", "(end)", "re-run (rule)", "bytes held"):
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
