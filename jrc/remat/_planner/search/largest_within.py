"""The largest size whose peak is within a budget, where bytes grow nearly in proportion to it.

>>> asked = []
>>> def peak(size):
...     asked.append(size)
...     return 100 + 7 * size
>>> largest_within(peak, 1000, 1, 2**20, Start(guess=120, fixed=90)), asked
(128, [120, 128, 129])
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

_FIRST = 8
"""Without a size that fits, this many steps are predicted first."""


class Start(NamedTuple):
    """What is known before the first size is asked.

    Attributes:
        guess: The size that is asked first.
        fixed: The peak at size 0, about: bytes that do not grow with the size.
        least: A size that fits.
    """

    guess: int
    fixed: int
    least: int = 0


def largest_within(
    peak: Callable[[int], int], budget: int, step: int, end: int, start: Start | None = None
) -> int:
    """Return a multiple of `step` up to `end` that is within the budget, while the next one is not.

    It is the largest one where peaks never fall. Sizes are asked where a line meets the budget:
    through the smallest size and the last one that was asked, and once a size fits and a larger one
    does not, through these two.

    Args:
        peak: The peak of a size in bytes.
        budget: Bytes.
        step: The result is a multiple of this.
        end: A multiple of `step`.
        start: What is known; without it `step` is asked first.

    Returns:
        The size; 0, or `start.least`, if nothing else fits.
    """
    if start is None:
        first = peak(step)
        if first > budget:
            return 0
        known, low, guess = {step: first}, step, min(_FIRST * step, end)
    else:
        known, low = {0: start.fixed}, start.least
        guess = max(low + step, min(start.guess // step * step, end))
    high, same = end + step, 0
    while high - low > step:
        known[guess] = peak(guess)
        fits = known[guess] <= budget
        same = max(same, 0) + 1 if fits else min(same, 0) - 1
        low, high = (guess, high) if fits else (low, guess)
        guess = _guess(known, budget, step, low, high, same)
    return low


def predicted_start(
    own_bytes: Callable[[int], int],
    predicted: Callable[[int], int],
    budget: int,
    step: int,
    end: int,
    least: int = 0,
) -> Start | None:
    """Return the size that is predicted to fit barely, from the predictions of two.

    Args:
        own_bytes: Bytes of the arguments, results and gradients of a size.
        predicted: The predicted peak of a size.
        budget: Bytes.
        step: Sizes are multiples of this.
        end: The largest size.
        least: A size that fits, if one is known.

    Returns:
        Where to begin; `None` if the smallest size's own bytes exceed the budget.
    """
    smallest = own_bytes(step)
    if not least and smallest > budget:
        return None
    size = min(max(least, _FIRST * step), end)
    growth = (own_bytes(size) - smallest) // max(size - step, 1)
    known = {0: smallest - growth * step}
    for _ in range(2):
        known[size] = predicted(size)
        wanted = min(line_meets(known, budget), end)
        size = max(step, math.floor(wanted) // step * step)
        if size in known:
            break
    return Start(size, known[0], least)


def line_meets(known: Mapping[int, int], budget: int) -> float:
    """Return the size where the line through two known ones meets the budget, by their peaks.

    The two are those nearest to the budget; infinite where peaks do not grow.
    """
    one, other = sorted(sorted(known, key=lambda size: abs(known[size] - budget))[:2])
    slope = (known[other] - known[one]) / (other - one)
    return one + (budget - known[one]) / slope if slope > 0 else math.inf


def _guess(known: Mapping[int, int], budget: int, step: int, low: int, high: int, same: int) -> int:
    """Return the size to ask next, strictly between `low` and `high`.

    Where several answers in a row moved the same end, peaks are no line. Then the other end counts
    as nearer to the budget (the Illinois rule); as long as there is none, the way doubles.
    """
    if low in known and high in known:
        below, above = max(budget - known[low], 0) + 1, known[high] - budget
        below, above = (_near(below, -same), _near(above, same))
        wanted = low + (high - low) * below / (below + above)
    else:
        known_end = low if low in known else high
        # The peak at size 0 is a guess, and of no use where two sizes were asked.
        least = min(size for size in known if size or len(known) < 3)
        ends = {size: known[size] for size in (least, known_end)}
        wanted = line_meets(ends, budget) if len(ends) > 1 else math.inf
        further = 2 ** max(abs(same) - 2, 0)
        if known_end == low:
            wanted = low + further * max(min(wanted, 16 * max(low, step)) - low, step)
        else:
            wanted = wanted if wanted < high else (low + high) / 2  # peaks do not grow there
            wanted = high - further * max(high - wanted, step)
    return max(low + step, min(math.floor(min(wanted, high)) // step * step, high - step))


def _near(distance: float, repeated: int) -> float:
    return distance / 4 ** min(max(repeated - 1, 0), 30)
