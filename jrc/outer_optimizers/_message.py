"""The message of a replica: levels, indices of 12 bits and short values, in 32-bit words.

Values that are closer to zero than to the lowest level are not rounded away from zero: such an
entry carries nothing, and repeats the first index of its chunk. A code that is not zero at the last
entry of a chunk, if that repeats the first index, says that the first carries nothing either.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jrc._bits import as_bits, packed, unpacked, words_for
from jrc._typing import Array, Float, UInt
from jrc.outer_optimizers._chunks import Chunks
from jrc.outer_optimizers._quantizers import Quantizer

INDEX_BITS = 12
"""Bits of an index in its chunk, which has at most 4096 entries."""

GROUP = 16
"""Entries that are written together: indices of 16 fill six words, their values of 2 bits one."""


@dataclasses.dataclass(frozen=True)
class LeafFormat:
    """How the entries of one leaf are sent.

    Attributes:
        chunks: The chunks of the leaf.
        k: Entries that are sent of each; all of them need no indices.
        quantizer: How values are written.
        per_chunk: Whether levels are fitted to each chunk, not to the whole leaf.
    """

    chunks: Chunks
    k: int
    quantizer: Quantizer
    per_chunk: bool

    @property
    def sparse(self) -> bool:
        """Whether indices are sent."""
        return self.k < self.chunks.width

    @property
    def sent(self) -> int:
        """Entries that are sent."""
        return self.chunks.count * self.k

    @property
    def level_words(self) -> int:
        """Words of the levels: two of float32 for a leaf, or two bfloat16 in one for each chunk."""
        if not self.quantizer.fitted:
            return 0
        return self.chunks.count if self.per_chunk else 2


class Coded(NamedTuple):
    """The entries of one leaf in the terms of the wire.

    Attributes:
        levels: float32[rows, 2], a row for each chunk or one for the leaf.
        indices: uint32[chunks, k], unless all entries are sent.
        codes: uint32[chunks, k].
    """

    levels: Array
    indices: Array | None
    codes: Array


def message_words(formats: Sequence[LeafFormat]) -> int:
    """Return the words of a message."""
    sparse = sum(each.sent for each in formats if each.sparse)
    levels = sum(each.level_words for each in formats)
    values = sum(each.sent for each in formats)
    bits = formats[0].quantizer.bits if formats else 2
    return levels + _words_of(sparse, INDEX_BITS) + _words_of(values, bits)


def coded(chunks: Float[Array, "count width"], leaf: LeafFormat) -> Coded:
    """Return the largest entries of each chunk, coded.

    Args:
        chunks: float32 entries of the leaf.
        leaf: How they are sent.

    Returns:
        Levels, indices and codes.
    """
    indices, values = None, chunks
    if leaf.sparse:
        # XLA's CPU compiler sorts whole chunks where a part of these indices is read. The barrier
        # hides that the last one is.
        indices = lax.optimization_barrier(lax.top_k(jnp.abs(chunks), leaf.k)[1])
        values = jnp.take_along_axis(chunks, indices, axis=1)
    rows = values if leaf.per_chunk else values.reshape(1, -1)
    levels = leaf.quantizer.levels(rows)
    if leaf.per_chunk:
        levels = levels.astype(jnp.bfloat16).astype(jnp.float32)
    codes = leaf.quantizer.codes(rows, levels).reshape(values.shape)
    if indices is not None:
        # The largest come first, so that those without worth are the last of their chunk.
        worthless = jnp.abs(values) <= levels[:, :1] / 2
        indices = jnp.where(worthless, indices[:, :1], indices).astype(jnp.uint32)
        codes = jnp.where(worthless, worthless[:, :1].astype(jnp.uint32), codes)
    return Coded(levels, indices, codes)


def added(
    total: Float[Array, "count width"],
    count: Float[Array, "count width"] | None,
    entries: Coded,
    leaf: LeafFormat,
    weight: Array,
) -> tuple[Array, Array | None]:
    """Add the values of one sender, and count its entries.

    Args:
        total: Sums so far.
        count: Numbers of senders so far, or `None` if they are not counted.
        entries: What the sender sent.
        leaf: How it was sent.
        weight: What values are multiplied by, 0 (left out, whatever they are), 1 or -1.

    Returns:
        The new sums and numbers.
    """
    rows = entries.codes if leaf.per_chunk else entries.codes.reshape(1, -1)
    values = leaf.quantizer.values(rows, entries.levels).reshape(entries.codes.shape)
    values = jnp.where(weight == 0, 0.0, weight * values)
    if entries.indices is None:
        return total + values, None if count is None else count + jnp.abs(weight)
    values = jnp.where(_carried(entries), values, 0.0)
    at = jnp.arange(leaf.chunks.count)[:, None], entries.indices.astype(jnp.int32)
    # Zero is added where an index stands again, so that the order of the additions is of no effect.
    total = total.at[at].add(values)
    if count is not None:
        count = count.at[at].add(jnp.where(values != 0, jnp.abs(weight), 0.0))
    return total, count


def _carried(entries: Coded) -> Array:
    """Whether each entry carries something: `bool[chunks, k]`. A single one always does."""
    assert entries.indices is not None
    if entries.indices.shape[1] == 1:
        return jnp.ones(entries.indices.shape, bool)
    again = entries.indices[:, 1:] == entries.indices[:, :1]
    nothing = again[:, -1:] & (entries.codes[:, -1:] != 0)
    return jnp.concatenate([~nothing, ~again], axis=1)


def written(entries: Sequence[Coded], formats: Sequence[LeafFormat]) -> UInt[Array, " words"]:
    """Return the message: levels of all leaves, then all indices, then all codes."""
    none = jnp.zeros(0, jnp.uint32)
    levels = [_level_words(each.levels, leaf) for each, leaf in zip(entries, formats, strict=True)]
    indices = [x.indices.reshape(-1) for x in entries if x.indices is not None]
    codes = [x.codes.reshape(-1) for x in entries]
    bits = formats[0].quantizer.bits if formats else 2
    return jnp.concatenate(
        [
            *levels,
            _in_groups(jnp.concatenate([none, *indices]), INDEX_BITS),
            _in_groups(jnp.concatenate([none, *codes]), bits),
        ]
    )


def _words_of(count: int, bits: int) -> int:
    return words_for(-(-count // GROUP) * GROUP, bits)


def _in_groups(values: UInt[Array, " n"], bits: int) -> UInt[Array, " words"]:
    return packed(jnp.pad(values, (0, -values.size % GROUP)), bits)


def read(words: UInt[Array, " words"], formats: Sequence[LeafFormat]) -> list[Coded]:
    """Return the entries of a message, leaf after leaf."""
    sparse = sum(leaf.sent for leaf in formats if leaf.sparse)
    begin = sum(leaf.level_words for leaf in formats)
    end = begin + _words_of(sparse, INDEX_BITS)
    bits = formats[0].quantizer.bits if formats else 2
    indices = unpacked(words[begin:end], INDEX_BITS, sparse)
    codes = unpacked(words[end:], bits, sum(leaf.sent for leaf in formats))
    found, level, index, code = [], 0, 0, 0
    for leaf in formats:
        shape = leaf.chunks.count, leaf.k
        levels = _levels_of(words[level : level + leaf.level_words], leaf)
        own = indices[index : index + leaf.sent].reshape(shape) if leaf.sparse else None
        found.append(Coded(levels, own, codes[code : code + leaf.sent].reshape(shape)))
        level, code = level + leaf.level_words, code + leaf.sent
        index += leaf.sent if leaf.sparse else 0
    return found


def _level_words(levels: Float[Array, "rows 2"], leaf: LeafFormat) -> Array:
    if not leaf.quantizer.fitted:
        return jnp.zeros(0, jnp.uint32)
    short = levels.astype(jnp.bfloat16) if leaf.per_chunk else levels
    return as_bits(short, jnp.uint32).reshape(-1)


def _levels_of(words: UInt[Array, " words"], leaf: LeafFormat) -> Array:
    rows = leaf.chunks.count if leaf.per_chunk else 1
    if not leaf.quantizer.fitted:
        return jnp.zeros((rows, 2), jnp.float32)
    if leaf.per_chunk:
        return as_bits(words, jnp.bfloat16).astype(jnp.float32)
    return as_bits(words, jnp.float32).reshape(1, 2)


def mean_of_messages(
    messages: UInt[Array, "replicas words"],
    valid: Array,
    formats: Sequence[LeafFormat],
    over_senders: bool,
) -> list[Array]:
    """Return the mean of what all valid replicas sent, leaf after leaf, added in rank order.

    Args:
        messages: What every replica sent.
        valid: bool[replicas], those whose messages count.
        formats: How each leaf was sent.
        over_senders: Whether an entry is divided by the number of replicas that sent it, and not
            by the number of all valid ones.

    Returns:
        float32 leaves.
    """

    def add(sums: list[tuple[Array, Array | None]], each: tuple[Array, Array]) -> tuple[list, None]:
        words, weight = each
        entries = zip(sums, read(words, formats), formats, strict=True)
        return [added(*total, found, leaf, weight) for total, found, leaf in entries], None

    def zeros(leaf: LeafFormat) -> Array:
        return jnp.zeros((leaf.chunks.count, leaf.chunks.width), jnp.float32)

    start = [(zeros(leaf), zeros(leaf) if over_senders else None) for leaf in formats]
    sums, _ = lax.scan(add, start, (messages, valid.astype(jnp.float32)))
    number = jnp.maximum(valid.sum().astype(jnp.float32), 1.0)
    means = [
        total / (number if count is None else jnp.maximum(count, 1.0)) for total, count in sums
    ]
    return [leaf.chunks.join(x) for leaf, x in zip(formats, means, strict=True)]


def without_sent(
    chunks: Float[Array, "count width"], entries: Coded, leaf: LeafFormat
) -> Float[Array, "count width"]:
    """Return entries less what receivers read of them."""
    return added(chunks, None, entries, leaf, jnp.float32(-1))[0]
