"""The programs for accelerators, run on the CPU: the same entries as the sorts choose."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jrc.dgc._collectives import gather
from jrc.dgc._entries import Space
from jrc.dgc._selectors import SELECTORS, Blocked, Exact, TwoStage
from jrc.dgc._selectors.accelerators import (
    GPU,
    TPU,
    Cut,
    _candidates,
    chosen_of_all,
    largest_in_cuts,
    row_width,
    whole,
)
from jrc.dgc._selectors.blocked import blocks_of
from jrc.dgc._selectors.counting import kth_largest_each, largest_each, places_of
from jrc.dgc._selectors.top_k import GROUP
from jrc.dgc._selectors.two_stage import largest_of_maxima
from tests.dgc.replicas import AXIS, mesh

KINDS = ("normal", "tied", "bf16", "zeros", "few", "ascending", "tiny", "infinite", "nan")
HOWS = {"tpu": TPU, "gpu": GPU}


def data(kind, n, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n).astype(np.float32)
    match kind:
        case "tied":
            values = rng.integers(-3, 4, n).astype(np.float32)
        case "bf16":
            values = np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32)
        case "zeros":
            values = np.where(rng.random(n) < 0.5, 0.0, -0.0).astype(np.float32)
        case "few":
            values = np.where(rng.random(n) < 1e-3, values, 0).astype(np.float32)
        case "ascending":
            values = np.sort(values)
        case "tiny":
            values = (2.0 ** rng.integers(-126, 0, n)).astype(np.float32)
        case "infinite":
            values[rng.integers(0, n, 5)] = np.inf
            values[rng.integers(0, n, 5)] = -np.inf
        case "nan":
            values[rng.integers(0, n, 3)] = np.nan
            values[rng.integers(0, n, 3)] = np.inf
    return values


def largest(values, k):
    """Return the indices of the k largest magnitudes, NaN the largest; ties to the lowest."""
    bits = np.abs(values).view(np.int32).astype(np.int64)
    return np.sort(np.argsort(-bits, kind="stable")[:k])


SIZES = (1, 17, 3000, 8192, 8192)
COUNTS = (1, 17, 2999, 9, 9)


@functools.cache
def chooser(name):
    cuts = [whole(n, k) for n, k in zip(SIZES, COUNTS, strict=True)]
    return jax.jit(lambda leaves: largest_in_cuts(leaves, cuts, HOWS[name]))


@pytest.mark.slow(after=2, every=True)
@pytest.mark.exhaustive(after=7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HOWS)
def test_counting_chooses_what_a_sort_chooses(name, kind):
    leaves = [data(kind, n, seed) for seed, n in enumerate(SIZES)]
    found = chooser(name)(leaves)
    for leaf, k, indices in zip(leaves, COUNTS, found, strict=True):
        np.testing.assert_array_equal(indices, largest(leaf, k))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("size, k, block", [(5001, 40, 2000), (70_001, 300, 5000), (5000, 37, 512)])
@pytest.mark.parametrize("name", HOWS)
def test_blocks_that_are_no_multiple_of_a_row(name, size, k, block):
    blocks = blocks_of(size, k, block)
    cut = Cut(size, blocks.width * GROUP, blocks.counts)
    choose = jax.jit(lambda leaf: largest_in_cuts([leaf], [cut], HOWS[name])[0])
    for kind in ("normal", "tied", "zeros"):
        leaf = data(kind, size)
        edges = np.arange(len(blocks.counts)) * cut.block
        want = [
            edge + largest(leaf[edge : edge + cut.block], count)
            for edge, count in zip(edges, blocks.counts, strict=True)
        ]
        np.testing.assert_array_equal(choose(leaf), np.concatenate(want))


@pytest.mark.slow(after=2, every=True)
@pytest.mark.parametrize("size, k, block", [(1003, 250, 1), (1003, 400, 40), (3000, 700, 150)])
@pytest.mark.parametrize("name", HOWS)
def test_blocks_narrower_than_a_row_need_no_more_than_the_leaf(name, size, k, block):
    blocks = blocks_of(size, k, block)
    cut = Cut(size, blocks.width * GROUP, blocks.counts)
    width = row_width(cut, HOWS[name])
    leaf = data("tied", size)
    bits, _ = jax.eval_shape(lambda leaf: _candidates([leaf], None, cut, width), leaf)
    assert bits.size < size + 2 * cut.block + width * len(blocks.counts) // 8
    found = jax.jit(lambda leaf: largest_in_cuts([leaf], [cut], HOWS[name])[0])(leaf)
    parts = zip(range(0, size, cut.block), blocks.counts, strict=True)
    want = [edge + largest(leaf[edge : edge + cut.block], count) for edge, count in parts]
    np.testing.assert_array_equal(found, np.concatenate(want))


@pytest.mark.slow
@pytest.mark.parametrize("name", HOWS)
def test_two_stages_choose_the_largest_of_the_same_blocks(name):
    n, k = 70_001, 100
    cut = TwoStage()._cut(n, k)
    assert cut.width == 80
    choose = jax.jit(lambda leaf: largest_in_cuts([leaf], [cut], HOWS[name])[0])
    for kind in ("normal", "tied", "zeros"):
        leaf = data(kind, n)
        want = np.sort(largest_of_maxima(jnp.asarray(leaf), k, 8))
        np.testing.assert_array_equal(choose(leaf), want)


@pytest.mark.slow
@pytest.mark.parametrize("k", [100, 3500])
@pytest.mark.parametrize("name", HOWS)
def test_the_largest_of_all_leaves(name, k):
    sizes = (7, 3000, 1, 40_000)
    space, ends = Space(sizes), np.cumsum(sizes)
    choose = jax.jit(lambda leaves: chosen_of_all(leaves, k, space, HOWS[name]))
    for kind in ("normal", "tied", "zeros"):
        leaves = [data(kind, n, seed) for seed, n in enumerate(sizes)]
        values, positions = choose(leaves)
        at = largest(np.concatenate(leaves), k)
        leaf = np.searchsorted(ends, at, side="right")
        want = at - (ends - sizes)[leaf] + np.asarray(space.starts)[leaf]
        np.testing.assert_array_equal(positions, want)
        np.testing.assert_array_equal(values, np.concatenate(leaves)[at])


def test_counts_and_places():
    x = jnp.asarray([[5, -1, 5, 0, 2**31 - 1], [0, 0, -1, 0, 0]], jnp.int32)
    counts = jnp.asarray([2, 4])
    assert kth_largest_each(x, counts).tolist() == [5, 0]
    assert largest_each(x, (2, 3)).tolist() == [
        [True, False, False, False, True],
        [True, True, False, True, False],
    ]
    # A tree of three levels.
    mask = np.random.default_rng(0).random(600_000) < 0.0001
    found = jax.jit(places_of, static_argnums=1)(mask, int(mask.sum()))
    np.testing.assert_array_equal(found, np.flatnonzero(mask))
    parts = jax.jit(places_of, static_argnums=(1, 2))(mask, int(mask.sum()), 7)
    np.testing.assert_array_equal(parts, found)


@pytest.mark.parametrize("name", HOWS)
def test_what_many_entries_need_is_in_proportion_to_the_leaf(name):
    """At a density of 25 % each entry of a leaf would else be looked up in 128 counts at once."""
    size = 1 << 20
    cut = whole(size, size // 4)
    choose = lambda leaf: largest_in_cuts([leaf], [cut], HOWS[name])[0]  # noqa: E731
    text = str(jax.make_jaxpr(choose)(jax.ShapeDtypeStruct((size,), jnp.float32)))
    gathered = {int(n) for n in re.findall(r"(?:i32|bool)\[(\d+),128\] = gather", text)}
    assert gathered and max(gathered) == size // 128


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("selector", [Exact(), Blocked(size=500), *SELECTORS.values()], ids=str)
def test_each_platform_lowers_its_own_program(selector):
    space = Space((70_001, 40))
    shapes = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in space.sizes]
    traced = jax.jit(lambda leaves: selector.choose(leaves, (70, 40), space)).trace(shapes)
    for platform in ("cpu", "tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("top_k" in text) == (platform == "cpu")
        assert platform == "cpu" or not re.search("stablehlo.(sort|scatter)", text)


def as_on(platform, monkeypatch):
    """Have the programs of a platform run here."""

    def chosen(*args, default=None, **programs):
        return programs.get(platform, default)(*args)

    monkeypatch.setattr(lax, "platform_dependent", chosen)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_batch_of_leaves(platform, monkeypatch):
    as_on(platform, monkeypatch)
    space, leaves = Space((3000,)), np.stack([data(kind, 3000) for kind in ("normal", "tied")])
    choose = jax.jit(jax.vmap(lambda x: SELECTORS["exact"].choose([x], (9,), space)))
    for leaf, positions in zip(leaves, choose(leaves).positions, strict=True):
        np.testing.assert_array_equal(positions, largest(leaf, 9))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("shape", [(4 * 33,), (4 * 3, 5)])
def test_a_gather_on_tpus_has_the_same_rows(shape, check_vma, monkeypatch):
    as_on("tpu", monkeypatch)
    words = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    run = jax.shard_map(
        lambda x: gather(x, AXIS), mesh=mesh(), in_specs=P(AXIS), out_specs=P(), check_vma=check_vma
    )
    np.testing.assert_array_equal(jax.jit(run)(words), words.reshape(4, -1, *shape[1:]))
