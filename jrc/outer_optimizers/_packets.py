"""What a replica sends in an exchange: a header, and the message of the outer optimizer."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrc._ring import ring_all_reduce_bytes
from jrc._typing import Array, PyTree, Scalar
from jrc.outer_optimizers._fragments import Fragment
from jrc.outer_optimizers._protocol import OuterOptimizer
from jrc.outer_optimizers._words import to_words


class Header(NamedTuple):
    """What a replica sends in front of its message, without loss.

    Attributes:
        valid: Whether every step of the round and the difference were finite, `bool[]`.
        loss: Sum of the losses of its inner steps since the last exchange, `float32[]`.
        grad_norm: Sum of the norms of their gradients, `float32[]`.
        steps: Number of these steps, `int32[]`.
        kept: Sum of the squares of what it has not sent of the fragment, `float32[]`.
        model_state: Its model state, with the last fragment; else `None`.
    """

    valid: Array
    loss: Scalar
    grad_norm: Scalar
    steps: Array
    kept: Scalar
    model_state: PyTree


class Packet(NamedTuple):
    """A header as words, and a message.

    Attributes:
        header: `uint32[words]`.
        message: uint32 words for an all-gather, float32 numbers for an all-reduce.
    """

    header: Array
    message: Array


def header_like(fragment: Fragment, model_state: PyTree) -> Header:
    """Return a header of a fragment with other values: the last one carries the model state."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    carried = model_state if fragment.is_last else None
    return Header(jnp.zeros((), bool), zero, zero, none, zero, carried)


def header_words(fragment: Fragment, model_state: PyTree) -> int:
    """Return the words of a fragment's header."""
    like = lambda state: to_words(header_like(fragment, state))  # noqa: E731
    return jax.eval_shape(like, model_state).size


def bytes_of_exchange(
    outer: OuterOptimizer, params: PyTree, header_words: int, replicas: int
) -> float:
    """Return the bytes that one replica sends for a fragment, in ring algorithms."""
    words = outer.message_words(params)
    if outer.collective == "all_reduce":
        dense = ring_all_reduce_bytes(words, replicas)
        return dense + 4.0 * header_words * (replicas - 1)
    return 4.0 * (words + header_words) * (replicas - 1)


def empty_packet(
    outer: OuterOptimizer, fragments: Sequence[Fragment], params: PyTree, model_state: PyTree
) -> Packet:
    """Return zeros, as many as the longest packet of a fragment has words.

    Args:
        outer: The outer optimizer.
        fragments: The parts of the parameters.
        params: The parameters, or their shapes.
        model_state: The model state, or its shapes.
    """
    header = max(header_words(each, model_state) for each in fragments)
    message = max(outer.message_words(each.shapes(params)) for each in fragments)
    dtype = jnp.float32 if outer.collective == "all_reduce" else jnp.uint32
    return Packet(jnp.zeros(header, jnp.uint32), jnp.zeros(message, dtype))


def padded(packet: Packet, like: Packet) -> Packet:
    """Return a packet with zeros behind it, as long as another."""
    return Packet(
        *(jnp.pad(x, (0, longer.size - x.size)) for x, longer in zip(packet, like, strict=True))
    )


def cut_to(packet: Packet, header: int, message: int) -> Packet:
    """Return a padded packet with so many words of header and message."""
    return Packet(packet.header[:header], packet.message[:message])
