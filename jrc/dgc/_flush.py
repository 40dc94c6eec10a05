"""The residual gradient of all replicas, applied to the parameters in one dense step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._tree import added
from jrc._typing import Array, PyTree
from jrc.dgc._state import is_placeholder

Rows = tuple[PyTree, PyTree]
"""u and v of one `DGCState`, with a row for each replica."""


def apply_residuals(
    params: PyTree, states: Sequence[Rows], learning_rate: Array
) -> tuple[PyTree, list[Rows]]:
    r"""Return $w - \eta \frac{1}{N} \sum v$, and zeros for u and v, as if all of v were sent.

    Args:
        params: The parameters, whole or split over a mesh.
        states: u and v of each compression; outside of `jax.shard_map`, so that all rows are seen.
        learning_rate: Eta, `float32[]`.

    Returns:
        The new parameters, in their dtypes, and rows of zeros.
    """
    for _, v in states:
        # A leaf that a mask keeps from a compression may be a whole subtree of the parameters.
        params = jax.tree.map(
            lambda rows, part: (
                part if is_placeholder(rows) else _descended(part, rows, learning_rate)
            ),
            v,
            params,
            is_leaf=is_placeholder,
        )
    return params, [jax.tree.map(jnp.zeros_like, rows) for rows in states]


def _descended(param: Any, rows: Array, learning_rate: Array) -> Array:
    return added(jnp.asarray(param), -learning_rate * jnp.mean(rows, axis=0))
