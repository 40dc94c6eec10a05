"""Fragments: each entry is in one of them, they are of about equal sizes, and each has its time."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from jrc.outer_optimizers._internal import fragments_of, turn_at

BLOCK = {"up": (64, 256), "down": (256, 64), "norm": (64,)}
LAYERS = {"blocks": [BLOCK] * 6, "embed": (257, 64), "scale": ()}
STACKED = {"blocks": {name: (6, *shape) for name, shape in BLOCK.items()}, "embed": (257, 64)}


def arrays(shapes):
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    number = iter(range(1000))
    return jax.tree.map(lambda s: jnp.full(s, next(number), jnp.float32), shapes, is_leaf=is_shape)


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("shapes", [LAYERS, STACKED], ids=["layers", "stacked"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_each_entry_is_in_one_fragment_of_equal_size(shapes, count):
    tree = arrays(shapes)
    fragments = fragments_of(tree, count)
    sizes = [sum(x.size for x in fragment.of(tree)) for fragment in fragments]
    total = sum(x.size for x in jax.tree.leaves(tree))
    assert len(fragments) == count and sum(sizes) == total
    assert max(sizes) < 1.35 * total / count
    marked = jax.tree.map(jnp.zeros_like, tree)
    for fragment in fragments:
        marked = fragment.put(marked, [x + 1 for x in fragment.of(marked)])
    assert all((x == 1).all() for x in jax.tree.leaves(marked))


def test_one_fragment_is_the_tree_itself_and_layers_stay_whole():
    tree = arrays(LAYERS)
    (only,) = fragments_of(tree, 1)
    assert only.of(tree) is tree and only.put(tree, "new") == "new"
    pieces = [piece for fragment in fragments_of(tree, 3) for piece in fragment.pieces]
    assert all(piece.whole for piece in pieces)


def test_cuts_along_rows_are_these():
    shapes = {"b": (128,), "w": (64, 128)}
    found = [each.pieces for each in fragments_of(arrays(shapes), 2)]
    assert found == [((0, 0, 128, True), (1, 0, 32, False)), ((1, 32, 64, False),)]


def test_leaves_that_are_not_cut_are_whole_in_the_nearer_fragment():
    """As those whose leading axis is split inside of a replica."""
    tree = arrays({"a": (8, 4), "b": (64, 4), "c": (40, 4)})
    found = [[x[:3] for x in each.pieces] for each in fragments_of(tree, 2)]
    assert found == [[(0, 0, 8), (1, 0, 48)], [(1, 48, 64), (2, 0, 40)]]
    found = [each.pieces for each in fragments_of(tree, 2, uncut={1})]
    assert [[tuple(x) for x in each] for each in found] == [
        [(0, 0, 8, True), (1, 0, 64, True)],
        [(2, 0, 40, True)],
    ]
    (first, _) = fragments_of(tree, 2)
    shapes = jax.eval_shape(first.of, tree)
    assert first.shapes(tree) == [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]
    assert first.each({"a": "x", "b": "y", "c": "z"}) == ["x", "y"]
    with pytest.raises(ValueError, match="no more fragments than the parameters can be cut"):
        fragments_of(tree, 4, uncut={0, 1, 2})


def test_leaves_that_cannot_be_cut():
    none = {"a": jnp.zeros((3, 0)), "w": jnp.zeros((4, 2)), "z": jnp.zeros(())}
    assert len(fragments_of(none, 2)) == 2
    for tree in (jnp.zeros((1, 9)), [], [jnp.zeros(())]):
        with pytest.raises(ValueError, match="no more fragments than the parameters can be cut"):
            fragments_of(tree, 2)


def least_largest(sizes, count):
    """The largest of so many runs of entries that are not cut, at its least, from all ways."""
    best = {0: 0}  # by the number of entries in the runs so far
    for left in range(count - 1, -1, -1):
        new = {}
        for begin, largest in best.items():
            for end in range(begin + 1, len(sizes) - left + 1):
                run = max(largest, sum(sizes[begin:end]))
                new[end] = min(run, new.get(end, run))
        best = new
    return best[len(sizes)]


@pytest.mark.parametrize("seed", range(150))
def test_any_leaves_are_cut_into_runs_that_are_no_larger_than_they_must_be(seed):
    draw = np.random.default_rng(seed)
    shapes = []
    for _ in range(draw.integers(1, 7)):
        shape = draw.integers(1, 6, size=draw.integers(0, 3))
        grow = draw.integers(1, 60) if draw.random() < 0.3 else draw.random() > 0.05
        shapes.append(tuple(map(int, shape)) if shape.size < 1 else (int(shape[0]), int(grow)))
    uncut = {at for at in range(len(shapes)) if draw.random() < 0.4}
    parts = [1 if at in uncut or not shape else shape[0] for at, shape in enumerate(shapes)]
    sizes = [math.prod(s) // n for s, n in zip(shapes, parts, strict=True) for _ in range(n)]
    sizes = [size for size in sizes if size]
    tree = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    for count in range(2, len(sizes) + 1):
        found = fragments_of(tree, count, uncut=uncut)
        pieces = [piece for fragment in found for piece in fragment.pieces]
        rows = [(piece.leaf, row) for piece in pieces for row in range(piece.start, piece.stop)]
        assert rows == [(at, row) for at, s in enumerate(shapes) for row in range((*s, 1)[0])]
        assert all(piece.whole for piece in pieces if piece.leaf in uncut)
        own = [sum(math.prod(x.shape) for x in fragment.shapes(tree)) for fragment in found]
        assert len(own) == count and min(own) > 0
        assert max(own) <= 1.25 * least_largest(sizes, count)
    with pytest.raises(ValueError, match="no more fragments than the parameters can be cut"):
        fragments_of(tree, max(2, len(sizes) + 1), uncut=uncut)


def test_a_large_leaf_that_is_split_has_a_fragment_of_its_own():
    """Several even shares lie in it: one cut is at its end, and the others behind it."""
    shapes = [(1024, 64), (8, 64), (8, 64), (8, 64)]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = fragments_of(shapes, 4, uncut={0})
    assert [[piece.leaf for piece in each.pieces] for each in found] == [[0], [1], [2], [3]]
    found = fragments_of(shapes[::-1], 3, uncut={3})
    own = [sum(math.prod(x.shape) for x in each.shapes(shapes[::-1])) for each in found]
    assert own == [12 * 64, 12 * 64, 1024 * 64]


@pytest.mark.parametrize(
    ("every", "count", "overlap"),
    [(1, 1, 0), (5, 1, 0), (7, 7, 0), (100, 3, 0), (2, 1, 1), (5, 2, 1), (101, 50, 1)],
)
def test_each_fragment_has_its_step_of_every_round(every, count, overlap):
    outer = jrc.DiLoCo(every, fragments=count, overlap=overlap)
    turns = [turn_at(outer, i) for i in range(1, 3 * every + 1 + overlap)]
    sends = [turn.sends for turn in turns]
    assert [turn.receives for turn in turns] == [None] * overlap + sends[: len(turns) - overlap]
    for fragment in range(count):
        at = np.flatnonzero([x == fragment for x in sends[: 3 * every]]) + 1
        assert len(at) == 3 and (np.diff(at) == every).all()
    assert sends[every - 1] == count - 1
    # With overlap there is a step behind which nothing is under way.
    assert not overlap or not any(turn.sends is turn.receives is not None for turn in turns)
    gaps = np.diff(np.flatnonzero([x is not None for x in sends]))
    assert not gaps.size or gaps.max() <= math.ceil(every / count)
