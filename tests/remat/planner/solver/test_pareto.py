"""The filter of labels: what no other label equals or beats in everything, and nothing else."""

import numpy as np
import pytest

from jrc.remat._planner.solver.pareto import Labels, ParetoFilter


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_labels_that_remain_are_those_that_no_other_dominates(times, closed):
    """Of random labels with many ties; the bytes of one step count where a program is a loop."""
    draw = np.random.default_rng(times)
    for n in (1, 2, 3, 8, 31, 32, 33, 150):
        for values in (2, 5, 40):
            rows = draw.integers(0, values, (n, 4)).astype(float)
            if closed:
                rows[:, 0] = 0  # where no region is open
            got = _filtered(rows, times, closed)
            # Of several labels that are equal in what counts, one remains.
            counting = rows if times > 1 else rows[:, :3]
            front = {tuple(x) for x in counting if not _is_beaten(x, counting)}
            kept = [tuple(x) for x in (got if times > 1 else got[:, :3])]
            assert sorted(kept) == sorted(front)


def test_thinned_labels_are_some_of_the_given_ones_with_both_ends():
    """Where more remain than the limit, the leanest and the cheapest are among those kept."""
    n = 4000
    rest = np.arange(n, dtype=float)
    rows = np.stack([np.zeros(n), rest, rest[::-1], np.zeros(n)], axis=1)
    got = _filtered(rows, times=1, closed=True, limit=100)
    assert 2 <= len(got) <= 102
    assert got[0, 1] == 0 and got[-1, 2] == 0
    assert {tuple(x) for x in got} <= {tuple(x) for x in rows}


def _filtered(rows: np.ndarray, times: int, closed: bool, limit: int = 1000) -> np.ndarray:
    """The rows (open, rest, cost, saved) that remain, given in two parts."""
    half = len(rows) // 2
    parts = [
        Labels(*part.T, np.arange(len(part)))
        for part in (rows[:half], rows[half:])
        if len(part) or half
    ]
    kept = ParetoFilter(times, limit, 4000).filtered(parts, closed)
    return np.stack(kept.columns[:4], axis=1)


def _is_beaten(label: np.ndarray, labels: np.ndarray) -> bool:
    """Whether another label is nowhere larger, and smaller somewhere."""
    return bool(np.any(np.all(labels <= label, axis=1) & np.any(labels < label, axis=1)))
