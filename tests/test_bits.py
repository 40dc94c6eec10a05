"""Packed integers: nothing is lost, and no word is without need."""

import jax.numpy as jnp
import numpy as np
import pytest

from jrc._bits import packed, unpacked, words_for

WORDS_OF_77 = {2: 5, 4: 10, 5: 15, 8: 20, 12: 30, 16: 39, 32: 77}


@pytest.mark.slow(after=2, every=True)
@pytest.mark.parametrize("bits", WORDS_OF_77)
def test_packing_loses_nothing(bits):
    values = np.random.default_rng(bits).integers(0, 2**bits, 77, dtype=np.uint32)
    words = packed(jnp.asarray(values), bits)
    assert words.dtype == jnp.uint32 and words.size == words_for(77, bits) == WORDS_OF_77[bits]
    np.testing.assert_array_equal(unpacked(words, bits, 77), values)
    # Little-endian bits, one value behind the other.
    whole = sum(int(v) << (bits * i) for i, v in enumerate(values))
    assert whole == sum(int(w) << (32 * i) for i, w in enumerate(words))


@pytest.mark.parametrize(("bits", "dtype"), [(8, np.uint8), (16, np.uint16)])
def test_bytes_lie_as_in_memory(bits, dtype):
    values = np.arange(8).astype(dtype) * 31
    np.testing.assert_array_equal(packed(jnp.asarray(values), bits), values.view(np.uint32))
