"""The exchange `"dense"`: a sum of whole tensors, zero where nothing is sent."""

import dataclasses
from collections.abc import Sequence

from jrc._typing import Array, Float
from jrc.dgc._collectives import dense_mean
from jrc.dgc._exchanges.protocol import Transfer


@dataclasses.dataclass(frozen=True)
class DenseSum:
    """One all-reduce of the tensors: cheaper than entries with positions at low sparsity."""

    def words(self, transfer: Transfer) -> float:
        """Return the words that one replica sends to each of the others in a ring: `2 n / N`."""
        return 2 * sum(transfer.space.sizes) / transfer.replicas

    def mean(self, tensors: Sequence[Float[Array, "..."]], axis: str | None) -> list[Array]:
        """Return the means of the tensors over the replicas."""
        return dense_mean(tensors, axis)
