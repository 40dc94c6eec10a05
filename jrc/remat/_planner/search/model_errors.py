"""How far a model is off, of bytes or of seconds: a Gaussian process over a program's options.

What is modelled is the logarithm of the factor from what a model predicts to the truth. Errors of
two options are alike if the options are of one family, and more so if they are close in peak and in
cost: each known one says something of all others, and how sure that is.

>>> options = [Option(100, 0, 3), Option(200, 0, 2), Option(1000, 0, 0)]
>>> sizes = ErrorSizes(0.2, 0.15, 0.3, 0.3, 0.02, 0.7, baseline_is_alike=False)
>>> errors = ModelErrors(options, [100.0, 200.0, 1000.0], sizes)
>>> means, deviations = errors.given({0: 0.5})
>>> [round(float(mean), 2) for mean in means], bool(deviations[1] < deviations[2])
([0.5, 0.24, 0.2], True)

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, section 2.2.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jrc.remat._planner.costs.error_sizes import ErrorSizes
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Family, Option


class ModelErrors:
    """The errors of one model.

    Args:
        options: The options.
        temporaries: Bytes of temporaries of each, positive, by any model: who is near to whom.
        sizes: How large errors are, and what they have in common.
    """

    def __init__(
        self,
        options: Sequence[Option],
        temporaries: Sequence[float],
        sizes: ErrorSizes,
    ) -> None:
        # Of one in chunks the errors are those of others in chunks.
        baseline = np.array([each.is_baseline and not each.chunks for each in options])
        costs = np.array([float(each.cost) for each in options])
        logs = np.log(temporaries)
        # Distances, each in what is near.
        by_size = np.subtract.outer(logs, logs) / SETTINGS.near_peaks
        by_cost = np.subtract.outer(costs, costs) / (SETTINGS.near_costs * max(costs.max(), 1.0))
        alike = np.array([[_alike(a.family, b.family) for b in options] for a in options])
        near = np.exp(-np.hypot(by_size, by_cost))
        covariance = sizes.of_all**2 + alike * (sizes.of_family**2 + sizes.of_option**2 * near)
        # Other chunks make another program. Two that both have chunks have more in common.
        programs = {each.chunks: None for each in options}
        number = np.array([list(programs).index(each.chunks) for each in options])
        in_chunks = np.array([bool(each.chunks) for each in options])
        both = np.logical_and.outer(in_chunks, in_chunks)
        of_others = np.where(both, np.sqrt(sizes.chunks_are_alike), sizes.chunks_are_alike)
        covariance *= np.where(np.equal.outer(number, number), 1.0, of_others)
        # Where the baseline is not like the others, its error says nothing of theirs.
        covariance[baseline, :] *= sizes.baseline_is_alike
        covariance[:, baseline] *= sizes.baseline_is_alike
        covariance[np.ix_(baseline, baseline)] = sizes.of_baseline**2
        self._covariance, self._noise = covariance, sizes.noise
        self._mean = np.where(baseline, sizes.mean_of_baseline, sizes.mean)

    def given(self, known: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the standard deviation of the error of each option.

        Args:
            known: Known errors, by the position of the option.
        """
        at = list(known)
        mean, variance = self._mean.copy(), np.diag(self._covariance).copy()
        if at:
            errors = np.array([known[i] for i in at])
            noise = self._noise**2 * np.eye(len(at))
            across = self._covariance[:, at]
            weights = np.linalg.solve(self._covariance[np.ix_(at, at)] + noise, across.T)
            mean += weights.T @ (errors - self._mean[at])
            variance -= np.einsum("ij,ji->i", across, weights)
            mean[at], variance[at] = errors, 0.0
        return mean, np.sqrt(np.maximum(variance, 0.0) + self._noise**2)


def _alike(one: Family, other: Family) -> float:
    """How much of what errors of a family have in common those of another one have too."""
    if one == other:
        return 1.0
    return 0.5 if {one, other} == {"regions", "all regions"} else 0.0
