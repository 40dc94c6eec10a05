"""Where a row of arrays is cut into runs of about equally many entries.

Entries are counted over all leaves, in the order of the tree. A cut lies between two leaves, or
between two rows of one.

>>> Cuts([(2, 3), (6,)]).even(2), Cuts([(1, 2), (9, 2)], uncut={1}).even(2)
([0, 6, 12], [0, 2, 20])
"""

import bisect
import itertools
import math
from collections.abc import Collection, Sequence

SNAP = 8
"""A cut that is closer to the end of a leaf than this part of a fragment lies at the end."""


class Cuts:
    """The places where leaves may be cut.

    Attributes:
        total: Entries of all leaves.
        runs: How many runs of at least one entry there may be.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], uncut: Collection[int] = frozenset()
    ) -> None:
        """Take the shapes of the leaves, and the numbers of those that are not cut."""
        sizes = list(map(math.prod, shapes))
        self._ends = list(itertools.accumulate(sizes, initial=0))
        rows = [shape[0] if shape else 1 for shape in shapes]
        whole = [1 if at in uncut else count for at, count in enumerate(rows)]
        self._rows = rows
        self._parts = [part if size else 0 for part, size in zip(whole, sizes, strict=True)]
        self._steps = [size // max(part, 1) for part, size in zip(whole, sizes, strict=True)]
        self.total = self._ends[-1]
        self.runs = sum(self._parts)

    def even(self, count: int) -> list[int]:
        """Return the ends of runs of about equally many entries, with 0 in front.

        Cuts lie at the multiples of an even share, or at the end of a leaf that is near. What is
        larger than a share and cannot be cut counts as one share. Cuts move where a run would be
        empty, or larger than it must be by more than what lies near.

        Args:
            count: Number of runs, from 1 to `runs`.
        """
        largest = self._least_largest(count)
        largest += 2 * largest // SNAP
        first, last = self._begins(count, largest)
        share, ends = self._share(count), [0]
        pairs = zip(self._parts, self._steps, strict=True)
        weights = itertools.accumulate((n * min(step, share) for n, step in pairs), initial=0.0)
        line = list(weights)
        for number in range(1, count):
            least = max(self._at_least(ends[-1] + 1), first[count - number])
            most = min(self._at_most(ends[-1] + largest), last[count - number])
            ends.append(min(max(self._near(number * share, line, share), least), most))
        return [*ends, self.total]

    def row_at(self, place: int) -> tuple[int, int]:
        """Return the leaf and the row that begin at a cut; behind the last leaf its number."""
        if place in (0, self.total):
            return (0 if place == 0 else len(self._rows)), 0
        leaf = self._leaf_at(place)
        size = self._ends[leaf + 1] - self._ends[leaf]
        return leaf, (place - self._ends[leaf]) * self._rows[leaf] // size

    def _leaf_at(self, place: float) -> int:
        return bisect.bisect_right(self._ends, place) - 1

    def _at_most(self, place: int) -> int:
        """Return the last cut up to a place."""
        if place >= self.total:
            return self.total
        leaf = self._leaf_at(place)
        return place - (place - self._ends[leaf]) % self._steps[leaf]

    def _at_least(self, place: int) -> int:
        """Return the first cut from a place on."""
        below = self._at_most(max(place, 0))
        return below if below >= place else below + self._steps[self._leaf_at(below)]

    def _share(self, count: int) -> float:
        """Return the entries of a run where all that is larger has a run of its own."""
        pairs = list(zip(self._parts, self._steps, strict=True))
        share, known, alone = self.total / count, -1, 0
        while alone != known:
            known = alone
            alone = sum(n for n, step in pairs if step > share)
            rest = self.total - sum(n * step for n, step in pairs if step > share)
            share = rest / (count - alone)
        return share

    def _near(self, place: float, line: Sequence[float], share: float) -> int:
        """Return the cut near a place on a line of leaves: at the end of one, or at a row."""
        leaf = min(bisect.bisect_right(line, place), len(line) - 1) - 1
        begin, end = line[leaf], line[leaf + 1]
        if place - begin <= share / SNAP:
            return self._ends[leaf]
        if end - place <= share / SNAP:
            return self._ends[leaf + 1]
        row = round((place - begin) / (end - begin) * self._parts[leaf])
        return self._ends[leaf] + row * self._steps[leaf]

    def _least_largest(self, count: int) -> int:
        """Return the size of the largest of so many runs, at its least."""
        low, high = max(*self._steps, -(-self.total // count)), self.total
        while low < high:
            middle = (low + high) // 2
            if self._fits(count, middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _fits(self, count: int, largest: int) -> bool:
        place = 0
        for _ in range(count):
            place = self._at_most(place + largest)
        return place == self.total

    def _begins(self, count: int, largest: int) -> tuple[list[int], list[int]]:
        """Return where the last n runs may begin, for each n: the first and the last such cut."""
        first, last = [self.total], [self.total]
        for _ in range(count - 1):
            first.append(self._at_least(first[-1] - largest))
            last.append(self._at_most(last[-1] - 1))
        return first, last
