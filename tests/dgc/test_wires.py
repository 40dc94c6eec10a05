"""Wire formats: words written, their number, and the values read."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrc.dgc import EightBits, Global, scale_by_dgc
from jrc.dgc._entries import BLOCK, NOWHERE, Entries, Space, shifted
from jrc.dgc._exchanges import AllGather, Transfer
from jrc.dgc._wires import WIRES

SPACES = {
    "one entry": ((1,), 1, 0),
    "a whole leaf": ((300,), 300, 0),
    "edges": ((BLOCK, 1, 70_000, 3), 41, 6),
    "empty blocks": ((5, 6 * BLOCK, 2 * BLOCK + 1), 9, 0),
    "nothing": ((BLOCK + 1,), 4, 4),
}
"""Sizes of the leaves, entries of a payload, and how many of them only fill it up."""

LEAST = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
ODD = (0.0, -0.0, LEAST, -LEAST / 4, 1e-45, LARGEST, -LARGEST, np.inf, -np.inf, 3.3961775e38)


@functools.cache
def both_ways(wire, count, blocks):
    """One compiled program for all examples of a format and a space."""

    def run(values, positions):
        entries = WIRES[wire].ordered(Entries(values, positions))
        words = WIRES[wire].encode(entries, blocks)
        return words, WIRES[wire].decode(words, count, blocks)

    return jax.jit(run)


def drawn(space, count, filling, seed, kind):
    """Values, and unique positions in any order, those at the edges of blocks and leaves first."""
    rng = np.random.default_rng(seed)
    edges, rest = set(), set()
    for start, size in zip(space.starts[:-1], space.sizes, strict=True):
        blocks = range(start, start + size, BLOCK)
        edges |= {*blocks, *(block - 1 for block in blocks[1:]), start + size - 1}
        rest |= {start + int(i) for i in rng.permutation(min(size, 400))}
        rest |= {start + int(i) for i in rng.integers(0, size, 40)}
    first = rng.permutation(sorted(edges))
    last = rng.permutation(sorted(rest - edges))
    positions = rng.permutation(np.concatenate([first, last]).astype(np.int64)[: count - filling])
    positions = np.concatenate([positions, NOWHERE - np.arange(filling)]).astype(np.uint32)
    values = (10.0 ** rng.uniform(-30, 30, count) * rng.choice([-1, 1], count)).astype(np.float32)
    if kind == "near":
        values = rng.standard_normal(count).astype(np.float32)
    if kind == "odd":
        values = rng.choice(np.asarray(ODD, np.float32), count)
    values[count - filling :] = 0.0
    return values, positions


@pytest.mark.exhaustive(after=14)
@pytest.mark.slow(after=8)
@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("wire", WIRES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["far", "near", "odd"]))
def test_round_trip(wire, name, seed, kind):
    sizes, count, filling = SPACES[name]
    space = Space(sizes)
    values, positions = drawn(space, count, filling, seed, kind)
    words, found = both_ways(wire, count, space.blocks)(values, positions)
    assert words.dtype == jnp.uint32
    assert words.shape == (WIRES[wire].words(count, space.blocks),)
    order = np.arange(count) if wire == "f32" else np.argsort(positions, kind="stable")
    values, positions = values[order], positions[order]
    inside = positions < space.blocks * BLOCK
    np.testing.assert_array_equal(np.asarray(found.positions)[inside], positions[inside])
    assert (np.asarray(found.positions)[~inside] >= space.blocks * BLOCK).all()
    read = np.asarray(found.values)
    assert (read[~inside] == 0).all()
    check = {"f32": same_bits, "bf16": rounded, "fp8": within_a_step, "int8": within_a_step}[wire]
    check(read[inside], values[inside], positions[inside] // BLOCK, wire)


def same_bits(read, values, block, wire):
    del block, wire
    np.testing.assert_array_equal(read.view(np.uint32), values.view(np.uint32))


def rounded(read, values, block, wire):
    """The nearest bfloat16, saturating at the largest."""
    del block, wire
    most = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    want = np.clip(values, -most, most).astype(ml_dtypes.bfloat16).astype(np.float32)
    # XLA may take numbers below the smallest normal one as zero.
    want, read = (np.where(np.abs(x) < LEAST, 0.0, x) for x in (want, read))
    np.testing.assert_array_equal(read, want)


def within_a_step(read, values, block, wire):
    """Half a step of the block's scale; fp8's steps are an eighth of the power of two below."""
    most = {"fp8": 448.0, "int8": 127.0}[wire]
    said = np.clip(values, -3.3895314e38, 3.3895314e38).astype(np.float64)
    for each in np.unique(block):
        here = block == each
        top = np.abs(said[here]).max()
        scale = top / most
        step = scale / 2
        if wire == "fp8":
            step = np.maximum(np.abs(said[here]) / 16, scale * 2.0**-10)
        # Scales below the smallest normal number may be zero.
        assert (np.abs(read[here] - said[here]) <= 1.0001 * step + most * LEAST).all()
        if scale > LEAST:
            np.testing.assert_allclose(np.abs(read[here]).max(), top, rtol=3e-7)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["edges", "nothing"])
def test_filling_entries_decode_to_no_position(name):
    sizes, count, filling = SPACES[name]
    space = Space(sizes)
    values, positions = drawn(space, count, filling, 0, "near")
    for wire in WIRES:
        _, found = both_ways(wire, count, space.blocks)(values, positions)
        places = shifted(found.positions, 0, space.blocks)
        assert (places == NOWHERE).sum() == filling
        leaves = space.leaves(Entries(found.values, places), None)
        inside = [leaf.indices < size for leaf, size in zip(leaves, sizes, strict=True)]
        assert sum(int(here.sum()) for here in inside) == count - filling


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("wire", WIRES)
def test_the_rest_and_what_receivers_read_add_up_to_what_was_sent(wire):
    space = Space((300, 40))
    values, positions = drawn(space, 17, 0, 1, "near")
    transfer = Transfer(space, (17, 0), Global(), WIRES[wire], 1, None)
    arrived, sent = AllGather().exchange(Entries(values, positions), transfer)
    assert arrived.words.shape == (1, WIRES[wire].words(17, 2))
    read = WIRES[wire].decode(arrived.words[0], 17, 2)
    np.testing.assert_array_equal(sent.left.positions, read.positions)
    order = np.argsort(np.asarray(read.positions)), np.argsort(positions)
    left, back, whole = sent.left.values[order[0]], read.values[order[0]], values[order[1]]
    np.testing.assert_allclose(left + back, whole, rtol=1e-6)
    assert (left == 0).all() == (wire == "f32")


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("wire", WIRES)
def test_what_a_format_rounds_away_stays_in_v(wire):
    gradient = jax.random.normal(jax.random.key(0), (500,))
    tx = scale_by_dgc(0.0, sparsity=0.75, min_size=0, wire=wire, exchange="allgather")
    updates, state = jax.jit(tx.update)(gradient, tx.init(gradient))
    sent = np.flatnonzero(updates)
    assert sent.size == 125
    lost = np.asarray(gradient)[sent] - np.asarray(updates)[sent]
    np.testing.assert_array_equal(state.v[0, sent], lost)
    assert (lost != 0).any() == (wire != "f32")


@pytest.mark.parametrize("kind", ["x", "", None])
def test_an_unknown_kind_of_eight_bits(kind):
    message = f"jrc.dgc.EightBits: kind must be one of 'fp8', 'int8', got {kind!r}."
    with pytest.raises(ValueError, match=re.escape(message)):
        EightBits(kind)
