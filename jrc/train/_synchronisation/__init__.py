"""The ways to synchronise replicas. A new one is a file, and its name in `WAYS`."""

from typing import Any

from jrc._typing import PyTree, Transform
from jrc.outer_optimizers import OuterOptimizer
from jrc.train._synchronisation.compressed import CompressedGradients
from jrc.train._synchronisation.mean import MeanGradients
from jrc.train._synchronisation.protocol import Synchronisation as Synchronisation
from jrc.train._synchronisation.protocol import Traffic as Traffic
from jrc.train._synchronisation.replicas import Replicas as Replicas
from jrc.train._synchronisation.replicas import norm_of as norm_of
from jrc.train._synchronisation.rounds import Rounds

WAYS: list[Any] = [Rounds, CompressedGradients, MeanGradients]
"""The first that is `of` the optimizers synchronises them; the last is of all."""


def synchronisation_of(
    tx: Transform, outer: OuterOptimizer | None, opt_state: PyTree
) -> Synchronisation:
    """Return how replicas with these optimizers agree.

    Args:
        tx: The optimizer.
        outer: The outer optimizer, if there is one.
        opt_state: A state of `tx`, or its shapes; alone, or in that of the outer optimizer.
    """
    found = (way.of(tx, outer, opt_state) for way in WAYS)
    return next(each for each in found if each is not None)
