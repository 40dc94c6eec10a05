"""Which leaves of a train state have a row for each replica, with and without `outer=`."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jrc._typing import PyTree
from jrc.dgc import dgc_specs
from jrc.dgc._internal import AxisName, replica_axis
from jrc.outer_optimizers import OuterState


def row_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """Return the tree of `PartitionSpec`s of a state over the replicas: rows are split, alone.

    Args:
        state: A train state, or its shapes.
        axis_name: The replica axis, or the pair `(inner, outer)` of which rows differ along the
            outer one.

    Returns:
        The same tree with a `PartitionSpec` in each leaf's place.
    """
    own = PartitionSpec(replica_axis(axis_name))
    if not outer_states(state):
        return dgc_specs(state, axis_name)

    def specs_of(node: Any) -> Any:
        if not isinstance(node, OuterState):
            return PartitionSpec()
        specs = jax.tree.map(lambda _: PartitionSpec(), node)
        return specs._replace(local=jax.tree.map(lambda _: own, node.local))

    return jax.tree.map(specs_of, state, is_leaf=_is_outer)


def outer_states(tree: PyTree) -> list[OuterState]:
    """Return every `OuterState` in a tree; a train state has one with `outer=`."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_outer)
    return [leaf for leaf in leaves if isinstance(leaf, OuterState)]


def _is_outer(node: object) -> bool:
    return isinstance(node, OuterState)
