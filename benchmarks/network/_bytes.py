"""Bytes that PyTorch's methods send, from shapes alone, and PyTorch's layout of kernels."""

import math
from collections.abc import Iterable, Sequence

FLOAT = 4
# The defaults of PyTorch's PowerSGDState.
RANK, LEAST_RATE = 1, 2


def in_torch(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a kernel's shape in PyTorch's layout, (out, in, height, width) or (out, in).

    PowerSGD takes the first axis for the rows of a matrix: a kernel in JAX's layout would have
    three.
    """
    *window, into, out = shape if len(shape) > 1 else (0, 0)
    return (out, into, *window) if len(shape) > 1 else tuple(shape)


def ring(entries: int, processes: int) -> float:
    """Return the bytes that a process sends in a ring all-reduce of float32."""
    return FLOAT * entries * 2 * (processes - 1) / processes


def powersgd_entries(shapes: Iterable[Sequence[int]]) -> int:
    """Return the entries to all-reduce: two factors of each leaf, or the leaf itself."""
    return sum(_entries(shape) for shape in shapes)


def _entries(shape: Sequence[int]) -> int:
    rows, columns = shape[0], math.prod(shape[1:])
    factors = (rows + columns) * min(rows, columns, RANK)
    return factors if factors * LEAST_RATE < rows * columns else rows * columns
