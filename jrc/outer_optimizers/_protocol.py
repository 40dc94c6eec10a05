"""What an outer optimizer is, for those that users write themselves."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from jrc._typing import Array, PyTree, Whole


class Encoded(NamedTuple):
    """What one replica sends in a round, and what it keeps.

    Attributes:
        message: uint32 words for an all-gather, or float32 numbers for an all-reduce.
        local: The state of this replica after the round.
        kept: Sum of the squares of what was not sent, of each leaf `float32[leaves]`, or of all
            `float32[]`. In a replica that is split, a leaf that lies on several devices counts once
            where there is one for each leaf.
    """

    message: Array
    local: PyTree
    kept: Array


@runtime_checkable
class OuterOptimizer(Protocol):
    """What `outer=` takes. Any hashable object with these members works.

    All methods are traced, and none may use collectives. It may also have `fragments`, `overlap`
    and `blend`, as `DiLoCo` has them. With several fragments each method is called for one of them,
    a list of arrays in the place of a parameter tree.

    Where replicas are split over several devices, each method gets the shards of one device. What
    it makes of a leaf must not depend on the entries of other leaves, so that devices with the same
    shard of it make the same. Arrays of a state that mirror parameters are split as these are,
    scalars are equal on all devices, and the devices' other arrays lie one after another.
    """

    @property
    def sync_every(self) -> Whole:
        """Return the inner steps of a round."""
        ...

    @property
    def collective(self) -> str:
        """Return how messages are exchanged: `"all_gather"` or `"all_reduce"`."""
        ...

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return the state of one replica, and the state that all share."""
        ...

    def encode(self, difference: PyTree, local: PyTree) -> Encoded:
        """Return the message of one replica.

        Args:
            difference: Shared parameters less the replica's own, float32, finite.
            local: The state of the replica.
        """
        ...

    def decode(
        self, params: PyTree, shared: PyTree, messages: Array, valid: Array
    ) -> tuple[PyTree, PyTree]:
        """Return the new shared parameters and shared state, from what is equal on all replicas.

        Args:
            params: The shared parameters.
            shared: The shared state.
            messages: After an all-gather uint32[replicas, words] in rank order, after an
                all-reduce the sum of the messages of the valid replicas.
            valid: bool[replicas]; messages of the others must be left out.
        """
        ...

    def message_words(self, params: Any) -> int:
        """Return the 32-bit words of a message."""
        ...

    def entries_sent(self, params: Any) -> int:
        """Return the entries of the parameters that a message has a value for, at most."""
        ...
