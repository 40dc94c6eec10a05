"""The warm-up: when each sparsity level begins, and how many entries it sends of a tensor."""

from collections.abc import Sequence

import numpy as np

COUNT_DTYPES = ("float64", "float32")
"""What `1 - sparsity` and its product with a size may be computed in."""


def entries_to_send(size: int, sparsity: float, dtype: str = "float64") -> int:
    """Return the entries sent of a tensor: `k = max(1, int(size * (1 - sparsity)))`.

    Args:
        size: Entries of the tensor.
        sparsity: Share that is kept back, in [0, 1).
        dtype: What it is computed in; `"float32"` gives the count of Paddle's kernel, which
            differs by one where the product comes close to a whole number.

    Returns:
        The number of entries, at least one.

    >>> entries_to_send(102400, 0.75)
    25600
    >>> entries_to_send(1_000_000, 0.999), entries_to_send(1_000_000, 0.999, "float32")
    (1000, 999)
    """
    number = np.dtype(dtype).type
    count = int(number(size) * (number(1) - number(sparsity)))
    # A size of more than 24 bits may be rounded up.
    return min(max(1, count), max(1, size))


def level_starts(rampup_begin_step: int, rampup_step: int, levels: int) -> tuple[int, ...]:
    """Return the first step of each level i of L: the least t with `(t - b) * L >= i * R`.

    With these the traced step needs no division for the level `int((t - b) * L / R)`, and a large
    step cannot overflow.

    Args:
        rampup_begin_step: b, the first compressed step.
        rampup_step: R, steps over which the levels are spread.
        levels: L, the number of sparsity levels.

    Returns:
        One step per level, not decreasing. A level that starts together with the next never runs.

    >>> level_starts(0, 100, 5)
    (0, 20, 40, 60, 80)
    """
    return tuple(rampup_begin_step + -(-i * rampup_step // levels) for i in range(levels))


def active_levels(
    rampup_begin_step: int, rampup_step: int, sparsity: Sequence[float]
) -> tuple[tuple[int, float], ...]:
    """Return the levels that get a step, as pairs of first step and sparsity.

    Args:
        rampup_begin_step: b, the first compressed step.
        rampup_step: R, steps over which the levels are spread.
        sparsity: The levels.

    Returns:
        Pairs `(start, sparsity)` with strictly increasing starts.

    >>> active_levels(3, 1, (0.75, 0.9, 0.999))
    ((3, 0.75), (4, 0.999))
    """
    starts = level_starts(rampup_begin_step, rampup_step, len(sparsity))
    ends = (*starts[1:], float("inf"))
    return tuple(
        (start, level)
        for start, end, level in zip(starts, ends, sparsity, strict=True)
        if start < end
    )
