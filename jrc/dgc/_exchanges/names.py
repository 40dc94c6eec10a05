"""The exchanges by name, and the rule behind `"auto"`."""

import dataclasses

from jrc.dgc._exchanges.allgather import AllGather
from jrc.dgc._exchanges.dense_sum import DenseSum
from jrc.dgc._exchanges.protocol import Exchange
from jrc.dgc._exchanges.sharded import Sharded


@dataclasses.dataclass(frozen=True)
class Auto:
    """For the last sparsity level the exchange that sends the fewest bytes, before it dense sums.

    Dense sums share one program whatever their counts; one for each level would take several times
    as long to compile. `Sharded` is weighed only if `selector=Blocked(...)` is given, because
    sharding drops entries on which replicas disagree.
    """


EXCHANGES: dict[str, Exchange | Auto] = {
    "allgather": AllGather(),
    "sharded": Sharded(),
    "dense": DenseSum(),
    "auto": Auto(),
}
