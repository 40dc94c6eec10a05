"""Every axis of the mesh must split something."""

import re
from collections.abc import Callable

from jrc._errors import listed
from jrc._layout import Layout, split_axes
from jrc._typing import PyTree
from jrc.train._state import TrainState

# The dimensions of a sharding in a program: `<@mesh, [{"data"}, {}]`.
_DIMENSIONS = re.compile(r"<@\w+, (\[[^\]]*\])")


def check_every_axis(
    text: Callable[[], str], state: TrainState, batch: PyTree, layout: Layout
) -> None:
    """Raise if a mesh axis splits nothing: its devices would all do the same work.

    Args:
        text: Returns the text of the program; called where state and batch name too few axes.
        state: The state.
        batch: The batch.
        layout: The layout; the axes of the replicas split the batch.

    Raises:
        ValueError: If neither state, batch nor the program of the loss function names an axis.
    """
    used = split_axes(state, batch)
    missing = [name for name in layout.splits_replicas if name not in used]
    if not missing:
        return
    # Metadata and names of operations may have the name of an axis: only shardings count.
    dimensions = "".join(_DIMENSIONS.findall(text()))
    missing = [name for name in missing if f'"{name}"' not in dimensions]
    if missing:
        raise ValueError(
            f"every axis of the mesh must split something, got {listed(missing)}, over "
            "which neither params, batch nor the loss function is split, so that its devices "
            "would repeat the same work. Split the batch over it, "
            f"PartitionSpec({(*layout.names, *missing)!r}), or the parameters, or leave it out of "
            "the mesh."
        )
