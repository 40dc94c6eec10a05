"""The exchanges: a mean of whole tensors, and a mean of packed entries."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, Int
from jrc.dgc import _axis
from jrc.dgc._payload import Entries, pack, unpack


def dense_mean(tensors: Sequence[Array], axis: str | None) -> list[Array]:
    """Means of float32 tensors over the replicas, in one all-reduce.

    Args:
        tensors: Local ones, of any shapes.
        axis: The replica axis.

    Returns:
        The means, equal on every replica.
    """
    if not tensors or axis is None:
        return list(tensors)
    flat = jnp.concatenate([tensor.reshape(-1) for tensor in tensors])
    mean = _axis.total(flat, axis) / _axis.num_replicas(axis)
    means, start = [], 0
    for tensor in tensors:
        means.append(mean[start : start + tensor.size].reshape(tensor.shape))
        start += tensor.size
    return means


def sparse_mean(
    entries: Sequence[Entries], sizes: Sequence[int], axis: str | None
) -> list[Float[Array, " n"]]:
    """Means of flat tensors of which each replica sends a few entries, in one all-gather.

    Args:
        entries: What this replica sends of each tensor.
        sizes: The tensors' lengths.
        axis: The replica axis.

    Returns:
        The means, equal on every replica to the last bit.
    """
    counts = [each.values.size for each in entries]
    payloads = _axis.gather(pack(entries), axis)
    return decode(payloads, counts, sizes)


def decode(
    payloads: Int[Array, "replicas words"], counts: Sequence[int], sizes: Sequence[int]
) -> list[Float[Array, " n"]]:
    """The mean that gathered payloads stand for.

    Replica after replica, in rank order: within one payload the indices are unique, so no two
    additions race and the order of the sums is the same everywhere.

    Args:
        payloads: uint32, one row a replica.
        counts: Entries of each tensor.
        sizes: The tensors' lengths.

    Returns:
        One flat float32 tensor for each size.
    """
    replicas = payloads.shape[0]

    def add(rank: Array, totals: list[Array]) -> list[Array]:
        row = lax.dynamic_index_in_dim(payloads, rank, keepdims=False)
        return [
            # A mean of few entries costs less than a division of the whole tensor.
            total.at[each.indices].add(each.values / replicas, unique_indices=True)
            for total, each in zip(totals, unpack(row, counts), strict=True)
        ]

    return lax.fori_loop(0, replicas, add, [jnp.zeros(size, jnp.float32) for size in sizes])
