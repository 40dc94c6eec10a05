"""Labels of the solver: ways to get to a place, as columns; and which of them remain."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Labels:
    """Ways to get here: bytes of the open stretch, of the closed ones, operations, kept bytes.

    Bytes of stretches are those of all turns of a loop, kept bytes those of one.
    """

    open: np.ndarray
    rest: np.ndarray
    flops: np.ndarray
    saved: np.ndarray
    step: np.ndarray

    def take(self, which: Any) -> "Labels":
        return Labels(*(getattr(self, f.name)[which] for f in dataclasses.fields(self)))


class DecisionTree:
    """Decisions as a tree: each label points at its last one."""

    def __init__(self) -> None:
        self._parents: list[np.ndarray] = [np.array([-1])]
        self._decisions: list[Any] = [None]
        self._size = 1

    def add(self, parents: np.ndarray, decision: Any) -> np.ndarray:
        """The same decision after each of these steps."""
        steps = np.arange(self._size, self._size + len(parents))
        self._decisions.append(decision)
        self._parents.append(parents)
        self._size += len(parents)
        return steps

    def backs(self, steps: Iterable[int]) -> Iterator[list[Any]]:
        """For each step its decision and all before it."""
        parents = np.concatenate(self._parents).tolist()
        lengths = [len(part) for part in self._parents]
        which = np.repeat(np.arange(len(lengths)), lengths).tolist()
        for step in steps:
            found = []
            while step > 0:
                found.append(self._decisions[which[step]])
                step = parents[step]
            yield found


@dataclasses.dataclass(frozen=True)
class ParetoFilter:
    """Which labels remain at one place.

    Attributes:
        times: How often the program runs.
        limit: About how many remain.
        scale: Bytes of all values together, which says how fine is fine enough.
    """

    times: int
    limit: int
    scale: int

    def of(self, parts: Sequence[Labels], closed: bool) -> Labels:
        """The labels that no other beats, thinned; `closed` where no stretch is open."""
        if len(parts) == 1 and len(parts[0].flops) == 1:
            return parts[0]
        fields = [f.name for f in dataclasses.fields(Labels)]
        labels = Labels(*(np.concatenate([getattr(p, f) for p in parts]) for f in fields))
        labels = labels.take(np.lexsort((labels.saved, labels.open, labels.flops, labels.rest)))
        if closed and self.times == 1:
            return self._thinned(falling_flops(labels), self.limit)
        return self._thinned(self._unbeaten(labels), self.limit // 2)

    def _unbeaten(self, labels: Labels) -> Labels:
        """Of labels sorted by `rest`, those that none equals or beats in everything."""
        if len(labels.flops) > self.limit:
            other = labels.open + labels.saved * (self.times - 1)
            cells = labels.rest * 400 // self.scale * 1000 + other * 100 // self.scale
            labels = labels.take(_first_of_each(cells, labels.flops))
        # Sorted by `rest`, and of equal ones the first stays: only those before can beat.
        order = np.arange(len(labels.flops))
        beats = order[:, None] < order[None, :]
        for x in (labels.open, labels.flops, *([labels.saved] if self.times > 1 else [])):
            beats &= x[:, None] <= x[None, :]
        return labels.take(~beats.any(0))

    def _thinned(self, labels: Labels, limit: int) -> Labels:
        """About `limit` of them, evenly spread; the ends stay."""
        n = len(labels.flops)
        if n <= limit:
            return labels
        cells = np.maximum(labels.rest, labels.open) * (2 * limit) // self.scale
        keep = _first_of_each(cells, labels.flops)
        if len(keep) > limit:
            keep = keep[np.unique(np.linspace(0, len(keep) - 1, limit).astype(int))]
        return labels.take(np.unique(np.concatenate([[0], keep, [n - 1]])))


def falling_flops(labels: Labels) -> Labels:
    """Of labels sorted by `rest`, those with fewer operations than all before them."""
    best = np.minimum.accumulate(labels.flops)
    return labels.take(np.concatenate([[True], labels.flops[1:] < best[:-1]]))


def _first_of_each(cells: np.ndarray, flops: np.ndarray) -> np.ndarray:
    """In each cell the one with the fewest operations, as sorted positions."""
    order = np.lexsort((flops, cells))
    return np.sort(order[np.concatenate([[True], np.diff(cells[order]) != 0])])
