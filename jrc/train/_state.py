"""The training state."""

from typing import NamedTuple

from jrc._text import brief
from jrc._typing import Count, PyTree, RandomKey


class TrainState(NamedTuple):
    """The state of a training run between two steps.

    Attributes:
        step: Number of steps so far, an int32 scalar.
        params: The parameters, equal on every replica.
        model_state: Running statistics and the like, equal on every replica; `None` without.
        opt_state: The optimizer's state. The `u` and `v` of a `DGCState` in it have a row for each
            replica; everything else is shared. With `outer=` an `OuterState`, whose `local` has a
            row for each replica; `params` and `model_state` are then those after the last round.
        key: The random key of the run. Each step folds it, and does not replace it.
    """

    step: Count
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    key: RandomKey

    def __repr__(self) -> str:
        fields = zip(self._fields, self, strict=True)
        lines = (f"  {name}={brief(value)},\n" for name, value in fields)
        return f"{type(self).__name__}(\n{''.join(lines)})"
