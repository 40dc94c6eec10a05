"""Labels of the solver, and the Pareto front of them.

A label is one way to decide all that is behind a place of the program: bytes, cost and the last
decision. Labels are columns of arrays. A label is dropped if another is at least as good in
everything; where too many remain, they are thinned evenly.
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jrc.remat._planner.settings import SETTINGS


@dataclasses.dataclass(frozen=True)
class Labels:
    """Labels at one place, one array entry each.

    Attributes:
        open: Peak bytes of the region that is not closed yet, all steps of a loop together.
        rest: Peak bytes of everything behind it, all steps of a loop together.
        cost: The cost of what is recomputed.
        saved: Bytes that are saved, of one step of a loop.
        step: The last decision, a node of the `DecisionTree`.
    """

    open: np.ndarray
    rest: np.ndarray
    cost: np.ndarray
    saved: np.ndarray
    step: np.ndarray

    def take(self, which: Any) -> "Labels":
        """Return some of the labels."""
        return Labels(*(x[which] for x in self.columns))

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """All arrays, in the order of the attributes."""
        return self.open, self.rest, self.cost, self.saved, self.step


class DecisionTree:
    """All decisions as a tree: each label points at its last one."""

    def __init__(self) -> None:
        self._parents: list[np.ndarray] = [np.array([-1])]
        self._decisions: list[Any] = [None]
        self._starts = [0]
        self._size = 1

    def add(self, parents: np.ndarray, decision: Any) -> np.ndarray:
        """Add the same decision behind each of these nodes; return the new nodes."""
        steps = np.arange(self._size, self._size + len(parents))
        self._decisions.append(decision)
        self._parents.append(parents)
        self._starts.append(self._size)
        self._size += len(parents)
        return steps

    def histories(self, steps: Iterable[int]) -> Iterator[list[Any]]:
        """Yield for each node its decision and all before it."""
        for step in steps:
            found = []
            while step > 0:
                # The tree of a large program has tens of millions of nodes: they are not copied.
                k = bisect.bisect_right(self._starts, step) - 1
                found.append(self._decisions[k])
                step = int(self._parents[k][step - self._starts[k]])
            yield found


@dataclasses.dataclass(frozen=True)
class ParetoFilter:
    """Drops dominated labels, and thins what remains.

    Attributes:
        times: How often the program runs (the length of a loop).
        limit: About how many labels remain.
        scale: Bytes of all values together, the unit of the grid that thins.
    """

    times: int
    limit: int
    scale: int

    def filtered(self, parts: Sequence[Labels], closed: bool) -> Labels:
        """Return the front of all these labels; `closed` where no region is open."""
        labels = parts[0]
        if len(parts) == 1 and len(labels.cost) <= (1 if closed else self.limit // 2):
            return labels  # one step from a front makes labels equal in open bytes at the most
        if len(parts) > 1:
            columns = zip(*(part.columns for part in parts), strict=True)
            labels = Labels(*map(np.concatenate, columns))
        labels = labels.take(np.lexsort((labels.saved, labels.open, labels.cost, labels.rest)))
        if closed and self.times == 1:
            return self._thinned(falling_cost(labels), self.limit)
        return self._thinned(self._undominated(labels), self.limit // 2)

    def _undominated(self, labels: Labels) -> Labels:
        """Of labels sorted by `rest`, those that no other equals or beats in everything."""
        if len(labels.cost) > self.limit:
            other = labels.open + labels.saved * (self.times - 1)
            rest_cells = labels.rest * SETTINGS.coarse_rest // self.scale
            cells = rest_cells * 1000 + other * SETTINGS.coarse_open // self.scale
            labels = labels.take(_cheapest_of_each(cells, labels.cost))
        # Sorted by `rest`: only an earlier label can dominate, and of equal ones the first stays.
        n = len(labels.cost)
        dominates = labels.open[:, None] <= labels.open
        for x in (labels.cost, *([labels.saved] if self.times > 1 else [])):
            dominates &= x[:, None] <= x
        dominates &= _earlier(1 << n.bit_length())[:n, :n]
        is_dominated = dominates.any(0)
        return labels.take(~is_dominated) if is_dominated.any() else labels

    def _thinned(self, labels: Labels, limit: int) -> Labels:
        """About `limit` labels, evenly spread; the ends stay."""
        n = len(labels.cost)
        if n <= limit:
            return labels
        cells = np.maximum(labels.rest, labels.open) * (2 * limit) // self.scale
        keep = _cheapest_of_each(cells, labels.cost)
        if len(keep) > limit:
            keep = keep[np.unique(np.linspace(0, len(keep) - 1, limit).astype(int))]
        return labels.take(np.unique(np.concatenate([[0], keep, [n - 1]])))


def falling_cost(labels: Labels) -> Labels:
    """Return, of labels sorted by `rest`, those of less cost than all before them."""
    best = np.minimum.accumulate(labels.cost)
    return labels.take(np.concatenate([[True], labels.cost[1:] < best[:-1]]))


@functools.cache
def _earlier(n: int) -> np.ndarray:
    """Whether label i is in front of label j, for n labels."""
    return np.less.outer(np.arange(n), np.arange(n))


def _cheapest_of_each(cells: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """The label of least cost of each cell, as sorted positions."""
    order = np.lexsort((cost, cells))
    return np.sort(order[np.concatenate([[True], np.diff(cells[order]) != 0])])
