"""How far off models are: what is known of their errors before any is seen."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ErrorSizes:
    """Errors of a model: means and standard deviations of their logarithms.

    An error is the factor from what the model predicts to the truth.

    Attributes:
        of_all: What errors of all options have in common.
        of_family: What those of a family have in common beside that.
        of_option: What they have in common the less, the farther they are from each other.
        of_baseline: The error of the baseline, without chunks.
        noise: What of an error says nothing of others.
        chunks_are_alike: How much of it a program with regions in chunks and one without have in
            common; the square root is what two with different chunks have.
        baseline_is_alike: Whether the baseline has a part in what all have in common.
        mean: The mean error.
        mean_of_baseline: That of the baseline.
    """

    of_all: float
    of_family: float
    of_option: float
    of_baseline: float
    noise: float
    chunks_are_alike: float
    baseline_is_alike: bool = True
    mean: float = 0.0
    mean_of_baseline: float = 0.0
