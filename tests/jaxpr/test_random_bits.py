"""Random bits of a slice are those that all bits have there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrc._jaxpr.random_bits import _product, are_drawn_by_position, bits_at, bits_of_slice

KEY = jax.random.key(7)


def drawing(draw, key):
    """The equation that draws bits."""
    (eqn,) = [
        each for each in jax.make_jaxpr(draw)(key).eqns if each.primitive.name == "random_bits"
    ]
    return eqn


@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_bits_of_a_slice_are_those_of_the_whole(width, axis):
    shape = (6, 4, 3)
    with jax.enable_x64(width == 64):
        whole = jax.random.bits(KEY, shape, dtype=f"uint{width}")
        for start, limit in ((0, 2), (1, 3)):
            numbers = jnp.arange(start, limit, dtype="uint32")
            found = bits_at(KEY, numbers, shape, axis, width)
            wanted = jax.lax.slice_in_dim(whole, start, limit, axis=axis)
            assert found.dtype == whole.dtype
            np.testing.assert_array_equal(found, wanted)


def test_keys_draw_their_own_bits():
    keys = jax.random.split(KEY, 3)
    draw = jax.vmap(lambda key: jax.random.bits(key, (5, 2)))
    numbers = jnp.arange(2, 4, dtype="uint32")
    found = bits_of_slice(drawing(draw, keys), 1, keys, numbers)
    np.testing.assert_array_equal(found, draw(keys)[:, 2:4])


@pytest.mark.parametrize("stride", [1, 2**15, 2**32 - 1, 2**32, 3 * 2**35 + 77, 2**63 - 25])
def test_positions_beyond_32_bits(stride):
    """Attention masks of long sequences have more entries than that."""
    numbers = np.array([0, 1, 2**16 + 3, 2**31 - 1, 2**32 - 1], np.uint32)
    high, low = _product(jnp.asarray(numbers), stride)
    found = [(int(a) << 32) | int(b) for a, b in zip(high, low, strict=True)]
    assert found == [int(n) * stride % 2**64 for n in numbers]


def test_a_few_bits_of_very_many():
    """The last of 2**35 numbers, whose bits do not fit into memory here."""
    shape, last = (2**20, 2**12, 8), jnp.asarray([2**20 - 1], jnp.uint32)
    draw = jax.jit(lambda: bits_at(KEY, last, shape, 0, 32))
    found = np.asarray(draw())[0, -1, -1]
    position = 2**35 - 1
    words = np.array([position >> 32, position & (2**32 - 1)], np.uint32)
    first, second = jax.extend.random.threefry_2x32(jax.random.key_data(KEY), words)
    assert found == first ^ second


def test_which_generators_draw_by_position():
    draw = lambda key: jax.random.bits(key, (4,))  # noqa: E731
    assert are_drawn_by_position(drawing(draw, KEY))
    assert not are_drawn_by_position(drawing(draw, jax.random.key(0, impl="rbg")))
    with jax.threefry_partitionable(False):
        assert not are_drawn_by_position(drawing(draw, KEY))
