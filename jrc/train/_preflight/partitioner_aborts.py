"""Lookups at which XLA's partitioner aborts the process, in a step whose replicas are split.

Seen with jaxlib 0.12 on CPU: inside of a `shard_map` that is manual over the axis of the replicas,
with two or more axes inside of a replica, a gather needs a collective over some of these axes, and
the partitioner makes groups of all. An abort has no Python error: a warning comes before it.
"""

import re
import warnings
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrc._errors import listed
from jrc._layout import Layout
from jrc._specs import axes_of
from jrc._tree import named_leaves
from jrc._typing import PyTree
from jrc.train._state import TrainState

_LOOKUP = re.compile(r'stablehlo\.(?:dynamic_)?gather"?\(.*?: \(tensor<([0-9x]+)x[a-z]\w*>')


def warn_of_lookups(
    text: Callable[[], str], state: TrainState, batch: PyTree, layout: Layout
) -> None:
    """Warn if rows are looked up in a parameter whose split may make the partitioner abort.

    Args:
        text: Returns the text of the program; called where a parameter is split so.
        state: The state.
        batch: The batch.
        layout: The layout of the run.
    """
    inside = layout.splits_replicas
    if len(inside) < 2:
        return
    rows = _axes_of_indices(batch, layout) & set(inside)
    tables = _tables(state.params, rows, layout)
    if not tables:
        return
    for shape in dict.fromkeys(_LOOKUP.findall(text())):
        if shape not in tables:
            continue
        name, spec = tables[shape]
        warnings.warn(
            "jrc.make_train_step: XLA's partitioner is known to abort the process at a lookup in "
            f"an array that is split inside of a replica as params {name!r} is, {spec}, by indices "
            f"that are split over {listed(sorted(rows), 'none')} of {listed(inside)}. Split it "
            f"along its width over all of them, {PartitionSpec(None, inside)}, or use via='jit'.",
            stacklevel=2,
        )


def _tables(
    params: PyTree, rows: Collection[str], layout: Layout
) -> dict[str, tuple[str, PartitionSpec]]:
    """Return parameters by their shape, as programs print it, if all of a shape are split so."""
    specs = jax.tree.leaves(layout.specs(params, "params"))
    found: dict[str, tuple[str, PartitionSpec]] = {}
    safe = set()
    for (name, leaf), spec in zip(named_leaves(params), specs, strict=True):
        shape = "x".join(map(str, leaf.shape))
        if may_abort(spec, rows, layout.splits_replicas):
            found.setdefault(shape, (name, spec))
        else:
            safe.add(shape)
    return {shape: each for shape, each in found.items() if shape not in safe}


def _axes_of_indices(batch: PyTree, layout: Layout) -> set[str]:
    """Return the axes over which integers of the batch are split."""
    pairs = zip(jax.tree.leaves(batch), jax.tree.leaves(layout.batch(batch)), strict=True)
    return {
        axis
        for leaf, spec in pairs
        if jnp.issubdtype(leaf.dtype, jnp.integer)
        for axis in axes_of(spec)
    }


def may_abort(spec: PartitionSpec, rows: Collection[str], inside: Collection[str]) -> bool:
    """Return whether the partitioner may abort at a lookup, as measured on (2, 2, 2) devices.

    Whether it does depends on the rest of the program too. It was not seen to abort where the table
    is split along its width over all axes inside of a replica, or along one dimension and the
    indices not at all.

    Args:
        spec: How the table is split.
        rows: The axes inside of a replica over which the indices are split.
        inside: All axes inside of a replica.

    >>> may_abort(PartitionSpec(None, "fsdp"), {"fsdp"}, {"fsdp", "model"})
    True
    >>> may_abort(PartitionSpec(None, ("fsdp", "model")), {"fsdp"}, {"fsdp", "model"})
    False
    """
    lead = set(axes_of(PartitionSpec(*spec[:1]))) & set(inside)
    width = set(axes_of(PartitionSpec(*spec[1:]))) & set(inside)
    if not rows:
        return bool(lead and width)
    return bool(lead) or (bool(width) and width != set(inside))
