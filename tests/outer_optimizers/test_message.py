"""The wire: golden bytes, lossless packing, tiles, and quantizers that never make errors larger."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from jrc._bits import unpacked
from jrc.outer_optimizers._chunks import chunks_of
from jrc.outer_optimizers._internal import from_words, to_words
from jrc.outer_optimizers._quantizers import DENSE, SPARSE, PowersOfTwo


def test_golden_bytes_of_the_wire():
    """Sixteen entries of 14 bits in exactly seven words: six of indices, one of values."""
    values = np.zeros(4096, np.float32)
    at = 256 * np.arange(16) + np.arange(16)
    values[at] = [9, -8, 9, 8, -9, 8, 9, 8, 9, 8, -9, 8, 2, 2, -2, 2]
    outer = jrc.SparseLoCo(density=16 / 4096)
    message = jax.jit(outer.encode)(jnp.asarray(values), jnp.zeros(4096)).message
    levels = np.asarray(message[:2]).view(np.float32)
    np.testing.assert_allclose(levels, [2.0, 8.5], rtol=1e-6)
    # The largest first, the lower index first among equals.
    assert unpacked(message[2:8], 12, 16).tolist() == [
        *(257 * i for i in (0, 2, 4, 6, 8, 10)),
        *(257 * i for i in (1, 3, 5, 7, 9, 11)),
        *(257 * i for i in (12, 13, 14, 15)),
    ]
    assert [f"{word:08x}" for word in message.tolist()[2:]] == GOLDEN
    assert message.size == 2 + 7 == outer.message_words(values)


# Indices 0, 514, 1028, … of 12 bits each; then 1, 1, 3, 1, 1, 3, 3, 1, …, 2, 0 of two bits.
GOLDEN = ["04202000", "a8086064", "303101a0", "09707505", "dc0cb0b9", "f0fe0ed0", "20557d75"]


def test_no_chunk_is_sorted_whole():
    """XLA on CPUs makes a sort of `top_k` if a part of its indices is read."""
    leaf, outer = jax.ShapeDtypeStruct((128, 128), jnp.float32), jrc.SparseLoCo()
    text = jax.jit(outer.encode).lower(leaf, leaf).compile().as_text()
    assert "TopK" in text
    assert " sort(" not in text


@pytest.mark.slow(after=3, every=True)
@pytest.mark.parametrize(
    "shape",
    [(128, 192), (100, 65), (64, 64), (3, 70, 64), (5000,), (7,), (1,), (), (2, 3), (4, 4, 300)],
)
def test_chunks_have_every_entry_once(shape):
    chunks = chunks_of(shape, 4096)
    leaf = jnp.arange(1.0, 1 + max(1, int(np.prod(shape)))).reshape(shape)
    cut = chunks.split(leaf)
    assert cut.shape == (chunks.count, chunks.width) and chunks.width <= 4096
    np.testing.assert_array_equal(chunks.join(cut), leaf)
    assert sorted(np.ravel(cut)[np.ravel(cut) > 0]) == sorted(np.ravel(leaf))
    # Little is padding: less than a row and a column of tiles, or an entry for each piece.
    assert cut.size - leaf.size <= sum(chunks.tiles) * 128


def test_a_tile_is_a_square_of_neighbours():
    cut = chunks_of((128, 128), 4096).split(jnp.arange(128.0 * 128).reshape(128, 128))
    np.testing.assert_array_equal(
        cut[1].reshape(64, 64), np.arange(128 * 128).reshape(128, 128)[:64, 64:]
    )


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize("name", SPARSE)
def test_a_code_says_the_nearest_level(name):
    quantizer = SPARSE[name]
    values = jnp.asarray(np.random.default_rng(0).normal(size=(3, 500)).astype(np.float32))
    levels = quantizer.levels(values)
    codes = quantizer.codes(values, levels)
    read = quantizer.values(codes, levels)
    assert codes.dtype == jnp.uint32 and int(codes.max()) < 2**quantizer.bits
    worth = jnp.abs(values) > levels[:, :1] / 2
    assert bool((jnp.where(worth, jnp.abs(read - values) <= jnp.abs(values), True)).all())
    error = float(jnp.square(read - values).mean())
    assert error < {"2bit": 0.13, "4bit": 0.03, "bf16": 1e-5, "f32": 1e-30}[name]
    np.testing.assert_array_equal(quantizer.codes(read, levels), codes)


def test_two_levels_are_the_best_of_all():
    """No other pair of a fine grid has a smaller error."""
    sizes = np.abs(np.random.default_rng(1).standard_exponential(400)).astype(np.float32) + 1
    low, high = SPARSE["2bit"].levels(jnp.asarray(sizes)[None])[0].tolist()
    error = lambda a, b: np.minimum((sizes - a) ** 2, (sizes - b) ** 2).sum()  # noqa: E731
    grid = np.linspace(sizes.min(), sizes.max(), 60)
    assert error(low, high) <= 1.01 * min(error(a, b) for a in grid for b in grid)


@pytest.mark.slow
def test_powers_of_two_keep_zero_and_the_largest():
    quantizer = PowersOfTwo()
    assert DENSE["4bit"] == quantizer
    values = jnp.asarray([[8.0, -4.0, 3.1, 0.0, -0.125, 0.01, 0.07, 6.1]])
    levels = quantizer.levels(values)
    read = quantizer.values(quantizer.codes(values, levels), levels)
    assert read.tolist() == [[8.0, -4.0, 4.0, 0.0, -0.125, 0.0, 0.125, 8.0]]


@pytest.mark.slow
def test_words_carry_any_leaf_without_loss():
    tree = {
        "bool": jnp.array([True, False]),
        "bf16": jnp.array([1.5, -2.0], jnp.bfloat16),
        "int8": jnp.array([-3], jnp.int8),
        "uint16": jnp.uint16(65535),
        "complex": jnp.array([1 + 2j], jnp.complex64),
        "key": jax.random.key(3),
        "empty": jnp.zeros((0, 2)),
        "nan": jnp.float32(np.nan),
    }
    rows = from_words(jnp.stack([to_words(tree)] * 2), tree)
    for name, leaf in tree.items():
        data = jax.random.key_data if name == "key" else lambda x: x
        assert rows[name].dtype == leaf.dtype
        np.testing.assert_array_equal(data(rows[name][1]), data(leaf))
