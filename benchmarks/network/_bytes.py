"""Bytes that PyTorch's methods send, from shapes alone, and the layout that it gives them."""

import math
from collections.abc import Iterable, Sequence

FLOAT = 4
# What PyTorch's PowerSGDState has by itself.
RANK, LEAST_RATE = 1, 2


def in_torch(shape: Sequence[int]) -> tuple[int, ...]:
    """A kernel of JAX's layout in PyTorch's, (out, in, height, width) or (out, in).

    PowerSGD takes the first axis for the rows of a matrix, so that a kernel in JAX's layout would
    be one of three rows.
    """
    *window, into, out = shape if len(shape) > 1 else (0, 0)
    return (out, into, *window) if len(shape) > 1 else tuple(shape)


def ring(entries: int, processes: int) -> float:
    """Bytes that a process sends in a ring all-reduce of float32."""
    return FLOAT * entries * 2 * (processes - 1) / processes


def powersgd_entries(shapes: Iterable[Sequence[int]]) -> int:
    """What is left to all-reduce of leaves in PyTorch's layout: two factors, or the leaf itself."""
    return sum(_entries(shape) for shape in shapes)


def _entries(shape: Sequence[int]) -> int:
    rows, columns = shape[0], math.prod(shape[1:])
    factors = (rows + columns) * min(rows, columns, RANK)
    return factors if factors * LEAST_RATE < rows * columns else rows * columns
