"""What the compression did in the last step, read from the state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrc._errors import public
from jrc._text import brief
from jrc._typing import Count, PyTree, Scalar
from jrc.dgc._state import dgc_states


class DGCStats(NamedTuple):
    """A report on the last step.

    Attributes:
        density: Share of the compressed leaves' entries that was sent, `float32[]`.
        bytes_sent: Bytes that one replica sent, `float32[]`.
        bytes_dense: Bytes that a dense all-reduce of the gradients, in their dtypes, would have
            sent, `float32[]`.
        norm_kept: L2 norm of all accumulated gradients that are not sent yet, `float32[]`.
        skipped: Steps skipped so far for a gradient that was not finite, `int32[]`.
        bytes_received: Bytes that one replica received, `float32[]`: in ring algorithms as many
            as it sent.
    """

    density: Scalar
    bytes_sent: Scalar
    bytes_dense: Scalar
    norm_kept: Scalar
    skipped: Count
    bytes_received: Scalar

    def __repr__(self) -> str:
        return brief(self)


@public("jrc.dgc_stats")
def dgc_stats(state: PyTree) -> DGCStats:
    """Return density, bytes and the norm of what was not sent, of the last step.

    Bytes are those of ring algorithms: `2 (N - 1) / N * 4 n` for an all-reduce of n float32
    entries, `(N - 1) * 8 k` for an all-gather of k float32 entries with their positions; one
    replica sends none. In a ring every replica receives as much as it sends. DGC adds up in
    float32: with bfloat16 gradients, `bytes_sent` of a step that compresses nothing is twice
    `bytes_dense`.

    Args:
        state: Any tree with one `DGCState` in it, such as the state of a chain.

    Returns:
        The report. `norm_kept` is that of one replica's v inside `shard_map`, and of the v of all
        replicas outside.

    Raises:
        ValueError: When the tree has no `DGCState`, or several.

    Example:
        >>> from jrc.dgc import scale_by_dgc
        >>> tx = scale_by_dgc(0.9, sparsity=0.75, min_size=0)
        >>> params = jnp.arange(8.0)
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> float(dgc_stats(state).density)
        0.25
    """
    found = dgc_states(state)
    if len(found) != 1:
        raise ValueError(
            f"state must have exactly one DGCState in it, got {len(found)} in "
            f"{type(state).__name__}. Pass the state of one optimizer made with jrc.scale_by_dgc."
        )
    (only,) = found
    squares = [jnp.sum(kept * kept) for kept in jax.tree.leaves(only.v)]
    norm = jnp.sqrt(sum(squares, start=jnp.float32(0)))
    sent = only.bytes_sent
    return DGCStats(only.density, sent, only.bytes_dense, norm, only.skipped, sent)
