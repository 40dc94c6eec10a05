"""The tree of the solver's decisions: right histories, in little memory."""

import tracemalloc

import numpy as np

from jrc.remat._planner.solver.pareto import DecisionTree


def test_a_history_has_the_decisions_of_its_own_label():
    """Labels part, are reordered and dropped; each node still knows what is before it."""
    draw = np.random.default_rng(0)
    tree = DecisionTree()
    steps, wanted = np.zeros(1, int), [[]]
    for decision in range(200):
        which = draw.integers(0, len(steps), draw.integers(1, 9))
        parents = [wanted[i] for i in which]
        taken = tree.add(steps[which], decision)
        kept = draw.permutation(len(steps))[:4]
        steps = np.concatenate([steps[kept], taken])
        wanted = [*(wanted[i] for i in kept), *([decision, *each] for each in parents)]
    assert max(map(len, wanted)) > 20
    assert list(tree.histories(steps.tolist())) == wanted


def test_to_read_a_history_copies_no_tree():
    """A tree of a quarter of a billion nodes, of a weather model, took 20 GB as lists."""
    tree = DecisionTree()
    steps = np.zeros(100_000, int)
    for decision in range(20):
        steps = tree.add(steps, decision)
    tracemalloc.start()
    (history,) = tree.histories([int(steps[-1])])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert history == [*reversed(range(20))]
    assert peak < 100_000
