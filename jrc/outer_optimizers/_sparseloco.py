"""SparseLoCo: error feedback, the largest entries of each chunk, two bits a value."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jrc._errors import public
from jrc._typing import Array, PyTree, Real, Whole
from jrc._validate import finite_number, one_of, whole_number
from jrc.outer_optimizers._chunks import chunks_of
from jrc.outer_optimizers._fragments import check_fragments
from jrc.outer_optimizers._leaves import (
    leaves_with_entries,
    shapes_of,
    stepped,
    with_leaves,
    zeros_like,
)
from jrc.outer_optimizers._message import (
    INDEX_BITS,
    LeafFormat,
    coded,
    mean_of_messages,
    message_words,
    without_sent,
    written,
)
from jrc.outer_optimizers._protocol import Encoded
from jrc.outer_optimizers._quantizers import SPARSE

LEVELS = ("leaf", "chunk")
MEANS = ("all", "senders")


@dataclasses.dataclass(frozen=True)
class SparseLoCo:
    r"""Exchange a few entries of what replicas changed, in few bits, every `sync_every` steps.

    $$e_r \leftarrow \beta e_r + \theta - \theta_r, \quad \hat v_r = Q(\text{top-}k(e_r)), \quad
    e_r \leftarrow e_r - \hat v_r, \quad
    \theta \leftarrow \theta - \eta \, \frac{1}{M} \sum_r \hat v_r$$

    Each replica has taken `sync_every` steps of its own with the inner optimizer, from the shared
    parameters theta to theta_r. What is not sent, and what rounding loses, stays in e. There is no
    outer momentum: e, which decays, takes its place. A message has 12 bits for the place of an
    entry in its chunk and 2 for its value: 0.21875 bits for each parameter at the defaults, besides
    two levels for each leaf.

    Attributes:
        sync_every: Inner steps of a round, H.
        density: Share of the entries of each chunk that is sent, in (0, 1]; at least one entry of
            each, and two where chunks share their levels. With 1 no indices are sent.
        chunk: Entries of a chunk, from 16 to 4096. A matrix with no fewer rows and columns than
            the square root of it is cut into square tiles (leading dimensions count as rows), all
            else into flat pieces.
        error_decay: Beta, in [0, 1].
        wire: Bits of a value: `"2bit"` (two levels and a sign, fitted to what is sent), `"4bit"`
            (eight levels), `"bf16"` or `"f32"`.
        outer_lr: Eta, the outer learning rate.
        levels: `"leaf"`: two float32 levels for each leaf. `"chunk"`: two bfloat16 levels for each
            chunk, which are closer and cost 32 bits a chunk.
        mean: What M is. `"senders"`: for each entry the number of replicas that sent it, as in the
            published code. `"all"`: the number of replicas that took part in the round, as in the
            paper, which makes shorter steps and needs many more rounds.
        fragments: Parts of the parameters that are exchanged at different steps, as for
            `jrc.DiLoCo`.
        overlap: 1: replicas take the next inner step while the exchange is under way. Then they go
            on with the shared parameters, and that step, one of `sync_every`, is lost. What was not
            sent is in e and may not stay in their own parameters too. 0: they wait.

    Raises:
        TypeError: If a number is none.
        ValueError: If a value is out of its range or a name not known.

    Example:
        >>> import jrc
        >>> jrc.SparseLoCo(sync_every=15, density=1 / 16).error_decay
        0.95
        >>> jrc.SparseLoCo(density=2)
        Traceback (most recent call last):
        ValueError: jrc.SparseLoCo: density must be a share in (0, 1], got 2. Write density=1/64.

    Source: Sarfi, Thérien, Lidin and Belilovsky, "Communication Efficient LLM Pre-training with
    SparseLoCo", arXiv:2508.15706, algorithm 1.
    """

    sync_every: Whole = 30
    density: Real = 1 / 64
    chunk: Whole = 4096
    error_decay: Real = 0.95
    wire: str = "2bit"
    outer_lr: Real = 1.0
    levels: str = "leaf"
    mean: str = "senders"
    fragments: Whole = 1
    overlap: Whole = 0

    collective = "all_gather"

    @public("jrc.SparseLoCo")
    def __post_init__(self) -> None:
        """Check every argument."""
        whole_number(self.sync_every, "sync_every", least=1, remedy="Write sync_every=30.")
        _share(self.density, "density", "(0, 1]", self.density != 0, "Write density=1/64.")
        remedy = "Write chunk=4096."
        whole_number(self.chunk, "chunk", least=16, most=2**INDEX_BITS, remedy=remedy)
        _share(self.error_decay, "error_decay", "[0, 1]", True, "Write error_decay=0.95.")
        one_of(self.wire, "wire", SPARSE)
        remedy = "Write outer_lr=1.0."
        finite_number(self.outer_lr, "outer_lr", positive=True, remedy=remedy)
        one_of(self.levels, "levels", LEVELS)
        one_of(self.mean, "mean", MEANS)
        check_fragments(self)

    def formats(self, params: Any) -> tuple[LeafFormat, ...]:
        """Return how each leaf with entries is sent."""
        return tuple(self._format(shape) for shape in shapes_of(params))

    def _format(self, shape: tuple[int, ...]) -> LeafFormat:
        chunks = chunks_of(shape, int(self.chunk))
        quantizer, per_chunk = SPARSE[self.wire], self.levels == "chunk"
        # A single entry has no way to carry nothing, where levels of other chunks are not zero.
        least = 2 if quantizer.fitted and chunks.count > 1 and not per_chunk else 1
        # The small term is for shares such as 0.07, whose product with a whole number is inexact.
        k = max(least, math.ceil(float(self.density) * chunks.width - 1e-9))
        return LeafFormat(chunks, k, quantizer, per_chunk)

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return e, which begins at zero, and no shared state."""
        return zeros_like(params), None

    def encode(self, difference: PyTree, local: PyTree) -> Encoded:
        """Return the message of one replica, and its new e.

        Args:
            difference: Shared parameters less its own, float32.
            local: e.

        Returns:
            uint32 words, the new e, and for each leaf the sum of its squares.
        """
        formats = self.formats(difference)
        decayed = jax.tree.map(lambda e, d: self.error_decay * e + d, local, difference)
        leaves = zip(leaves_with_entries(decayed), formats, strict=True)
        chunks = [leaf.chunks.split(e) for e, leaf in leaves]
        entries = [coded(x, leaf) for x, leaf in zip(chunks, formats, strict=True)]
        left = [
            leaf.chunks.join(without_sent(x, sent, leaf))
            for x, sent, leaf in zip(chunks, entries, formats, strict=True)
        ]
        local = with_leaves(decayed, left)
        kept = jnp.stack([jnp.zeros(()), *(jnp.sum(x * x) for x in jax.tree.leaves(local))])[1:]
        return Encoded(written(entries, formats), local, kept)

    def decode(
        self, params: PyTree, shared: PyTree, messages: Array, valid: Array
    ) -> tuple[PyTree, PyTree]:
        """Return the new shared parameters.

        Args:
            params: The shared parameters.
            shared: `None`.
            messages: uint32[replicas, words] in rank order.
            valid: bool[replicas].

        Returns:
            The parameters, and `None`.
        """
        over_senders = self.mean == "senders"
        means = mean_of_messages(messages, valid, self.formats(params), over_senders)
        return stepped(params, means, lambda mean: self.outer_lr * mean), shared

    def message_words(self, params: Any) -> int:
        """Return the 32-bit words of a message."""
        return message_words(self.formats(params))

    def entries_sent(self, params: Any) -> int:
        """Return the entries that a message has a value for, at most."""
        # All entries of a chunk are sent with their padding, which is no entry of the leaf.
        return sum(min(leaf.sent, leaf.chunks.size) for leaf in self.formats(params))


def _share(value: Any, name: str, interval: str, holds: bool, remedy: str) -> None:
    """Raise unless a value lies in an interval from 0 to 1."""
    rule = f"{name} must be a share in {interval}, got {value!r}. {remedy}"
    try:
        number = finite_number(value, name)
    except TypeError:
        raise TypeError(rule) from None
    except ValueError:
        raise ValueError(rule) from None
    if number > 1 or not holds:
        raise ValueError(rule)
