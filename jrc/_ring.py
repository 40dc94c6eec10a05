"""Bytes that a replica sends in a ring algorithm."""


def ring_all_reduce_bytes(entries: float, replicas: int, itemsize: int = 4) -> float:
    """Return the bytes that one replica sends in a ring all-reduce: `2 (N - 1) / N * n` entries.

    Args:
        entries: n.
        replicas: N.
        itemsize: Bytes of an entry.

    Returns:
        The bytes.

    >>> ring_all_reduce_bytes(1000, 4), ring_all_reduce_bytes(1000, 4, itemsize=2)
    (6000.0, 3000.0)
    """
    return 2 * (replicas - 1) / replicas * itemsize * entries
