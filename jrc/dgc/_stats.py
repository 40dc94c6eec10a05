"""What the compression did, read from the state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrc._typing import Count, PyTree, Scalar
from jrc.dgc._state import dgc_states


class DGCStats(NamedTuple):
    """A report on the last step.

    Attributes:
        density: Share of the compressed leaves' entries that was sent, `float32[]`.
        bytes_sent: Bytes that one replica sent, `float32[]`.
        bytes_dense: Bytes that a dense all-reduce would have sent, `float32[]`.
        norm_kept: L2 norm of all accumulated gradients that are still unsent, `float32[]`.
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


def dgc_stats(state: PyTree) -> DGCStats:
    """Density, bytes and the norm kept back, of the last step.

    Bytes count float32 in ring algorithms: `2 (N - 1) / N * 4 n` for an all-reduce of n entries,
    `(N - 1) * 8 k` for an all-gather of k; one replica sends none. Around a ring each replica
    sends to the next what it has from the one before, so as much arrives as leaves.

    Args:
        state: Any tree with one `DGCState` in it, such as the state of a chain.

    Returns:
        The report. `norm_kept` covers the v it is given: one replica's inside `shard_map`, those
        of all replicas for a whole state outside.

    Raises:
        ValueError: When the tree holds no `DGCState`, or several.

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
            f"jrc.dgc_stats: the state must hold exactly one DGCState, got {len(found)} in "
            f"{type(state).__name__}; pass the state of one optimizer made with scale_by_dgc"
        )
    (only,) = found
    squares = [jnp.sum(kept * kept) for kept in jax.tree.leaves(only.v)]
    norm = jnp.sqrt(sum(squares, start=jnp.float32(0)))
    sent = only.bytes_sent
    return DGCStats(only.density, sent, only.bytes_dense, norm, only.skipped, sent)
