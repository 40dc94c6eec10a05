"""DiLoCo: the mean of what all replicas changed, and Nesterov momentum."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jrc._errors import public
from jrc._typing import Array, PyTree, Real, Whole
from jrc._validate import check_flag, finite_number, one_of, whole_number
from jrc.outer_optimizers._chunks import Chunks
from jrc.outer_optimizers._fragments import check_fragments
from jrc.outer_optimizers._leaves import (
    leaves_with_entries,
    shapes_of,
    size_of,
    stepped,
    with_leaves,
    zeros_like,
)
from jrc.outer_optimizers._message import (
    LeafFormat,
    coded,
    mean_of_messages,
    message_words,
    written,
)
from jrc.outer_optimizers._protocol import Encoded
from jrc.outer_optimizers._quantizers import DENSE, Quantizer

_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    r"""Exchange all that replicas changed every `sync_every` steps, with outer momentum.

    $$g = \frac{1}{N} \sum_r (\theta - \theta_r), \quad m \leftarrow \mu m + g, \quad
    \theta \leftarrow \theta - \eta (g + \mu m)$$

    without Nesterov's form $\theta \leftarrow \theta - \eta m$.

    Attributes:
        sync_every: Inner steps of a round, H.
        outer_lr: Eta, the outer learning rate.
        outer_momentum: Mu, in [0, 1).
        nesterov: Whether the momentum is Nesterov's.
        wire: `"f32"`: one all-reduce of float32. `"4bit"`: one all-gather of four-bit floats (a
            sign, and a power of two below the largest of each 4096 entries of a leaf); what
            rounding loses is lost, as in Streaming DiLoCo.
        fragments: Parts of about equally many entries into which the parameters are cut, in the
            order of the tree. Each is exchanged every `sync_every` steps, at a time of its own, so
            that one exchange sends so many times less. At most `sync_every`.
        overlap: 1: replicas take the next inner step while the exchange is under way, and its
            result is applied at the end of that step; `sync_every` is at least `2 * fragments`. 0:
            they wait for it.
        blend: Alpha, the share of a replica's own parameters in those that it goes on with after an
            overlapped exchange: `alpha * own + (1 - alpha) * shared`. In [0, 1). With 0 the inner
            step that was taken meanwhile is lost, and replicas go on alike.

    Raises:
        TypeError: If a number is none, or `nesterov` not a bool.
        ValueError: If a value is out of its range.

    Example:
        >>> import jrc
        >>> jrc.DiLoCo(sync_every=50, fragments=5).wire
        'f32'
        >>> jrc.DiLoCo(sync_every=0)
        Traceback (most recent call last):
        ValueError: jrc.DiLoCo: sync_every must be a whole number >= 1, got 0. Write sync_every=100.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv:2311.08105, algorithm 1. Four bits, fragments and overlap: Douillard et al., "Streaming
    DiLoCo with overlapping communication", arXiv:2501.18512, algorithm 2, with layers in sequence
    (there also strided) and tau of one step. Alpha is 0.5 there; measured here, 0 ends at a lower
    loss (`docs/low_communication.md`).
    """

    sync_every: Whole = 100
    outer_lr: Real = 0.7
    outer_momentum: Real = 0.9
    nesterov: bool = True
    wire: str = "f32"
    fragments: Whole = 1
    overlap: Whole = 0
    blend: Real = 0.0

    @public("jrc.DiLoCo")
    def __post_init__(self) -> None:
        """Check every argument."""
        whole_number(self.sync_every, "sync_every", least=1, remedy="Write sync_every=100.")
        remedy = "Write outer_lr=0.7."
        finite_number(self.outer_lr, "outer_lr", positive=True, remedy=remedy)
        remedy = "Write outer_momentum=0.9."
        momentum = finite_number(self.outer_momentum, "outer_momentum", remedy=remedy)
        if momentum >= 1:
            raise ValueError(
                f"outer_momentum must be a number in [0, 1), got {momentum!r}. {remedy}"
            )
        check_flag(self.nesterov, "nesterov")
        one_of(self.wire, "wire", DENSE)
        check_fragments(self)

    @property
    def collective(self) -> str:
        """Return how messages are exchanged."""
        return "all_reduce" if self._quantizer is None else "all_gather"

    @property
    def _quantizer(self) -> Quantizer | None:
        return DENSE[self.wire]

    def formats(self, params: Any) -> tuple[LeafFormat, ...]:
        """Return how all entries of each leaf are sent in four bits: in flat chunks of its own."""
        if self._quantizer is None:
            return ()
        chunks = [_flat_chunks(shape) for shape in shapes_of(params)]
        return tuple(LeafFormat(each, each.width, self._quantizer, True) for each in chunks)

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return no state of a replica, and the momentum, which begins at zero."""
        return None, zeros_like(params)

    def encode(self, difference: PyTree, local: PyTree) -> Encoded:
        """Return the message of one replica.

        Args:
            difference: Shared parameters less its own, float32.
            local: `None`.

        Returns:
            float32 numbers, or uint32 words for four bits; `None`; and zero, as nothing is kept.
        """
        zero, leaves = jnp.zeros((), jnp.float32), leaves_with_entries(difference)
        if formats := self.formats(difference):
            pairs = zip(leaves, formats, strict=True)
            entries = [coded(each.chunks.split(leaf), each) for leaf, each in pairs]
            return Encoded(written(entries, formats), local, zero)
        parts = [leaf.reshape(-1) for leaf in leaves]
        return Encoded(jnp.concatenate([jnp.zeros(0, jnp.float32), *parts]), local, zero)

    def decode(
        self, params: PyTree, shared: PyTree, messages: Array, valid: Array
    ) -> tuple[PyTree, PyTree]:
        """Return the new shared parameters and momentum.

        Args:
            params: The shared parameters.
            shared: The momentum.
            messages: The sum of the valid replicas' messages, or all of them in rank order.
            valid: bool[replicas].

        Returns:
            Parameters and momentum.
        """
        if formats := self.formats(params):
            found = mean_of_messages(messages, valid, formats, over_senders=False)
        else:
            flat = messages / jnp.maximum(valid.sum().astype(jnp.float32), 1.0)
            found = _cut(flat, shapes_of(params))
        means = with_leaves(params, found)
        momentum = jax.tree.map(lambda m, g: self.outer_momentum * m + g, shared, means)
        ahead = lambda m, g: g + self.outer_momentum * m if self.nesterov else m  # noqa: E731
        directions = leaves_with_entries(jax.tree.map(ahead, momentum, means))
        return stepped(params, directions, lambda step: self.outer_lr * step), momentum

    def message_words(self, params: Any) -> int:
        """Return the 32-bit words of a message."""
        if self._quantizer is None or not size_of(params):
            return size_of(params)
        return message_words(self.formats(params))

    def entries_sent(self, params: Any) -> int:
        """Return the entries that a message has a value for."""
        return size_of(params)


def _flat_chunks(shape: tuple[int, ...]) -> Chunks:
    """Return equal pieces of a leaf, in the order of its entries."""
    count = -(-math.prod(shape) // _CHUNK)
    return Chunks(shape, (count, 1), (-(-math.prod(shape) // count), 1))


def _cut(flat: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Return the leaves of these shapes that lie one after another."""
    found, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        found.append(flat[start : start + size].reshape(shape))
        start += size
    return found
