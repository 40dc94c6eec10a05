"""The step of one device's shards: phase, compressed leaves, the others, and the report."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrc._typing import Array, Count, Real, Scalar
from jrc.dgc._collectives import as_local, bound_axes, dense_mean, finite_everywhere
from jrc.dgc._compressed import Work, run_phase
from jrc.dgc._config import DGCConfig
from jrc.dgc._leaves import Leaves, pick
from jrc.dgc._momentum import momentum_step
from jrc.dgc._phases import Phase, entry_at, phase_at, plan_phases
from jrc.dgc._shards import Shards, as_split

WHOLE = PartitionSpec()


class Before(NamedTuple):
    """The arrays that a step reads, leaf by leaf.

    Attributes:
        step: DGC steps taken, `int32[]`.
        scale: What the direction is multiplied by, `float32[]`.
        gradients: Local gradients of the compressed leaves, with a row axis.
        u: Their velocities.
        v: Their accumulated gradients.
        targets: What their direction is added to, `None` for zeros.
        dense: Local gradients of the other leaves.
        velocity: Their velocities.
    """

    step: Any
    scale: Any
    gradients: Any
    u: Any
    v: Any
    targets: Any
    dense: Any
    velocity: Any


class After(NamedTuple):
    """The arrays that a step returns.

    Attributes:
        ok: Whether the step is taken: all gradients on all devices are finite, `bool[]`.
        targets: The targets with the scaled direction added.
        u: New velocities of the compressed leaves.
        v: New accumulated gradients.
        directions: Directions of the other leaves.
        velocity: Their new velocities.
        density: Share of the compressed entries that is sent, `float32[]`.
        bytes_sent: Bytes that this device sends, `float32[]`.
    """

    ok: Any
    targets: Any
    u: Any
    v: Any
    directions: Any
    velocity: Any
    density: Any
    bytes_sent: Any


Specs = list[PartitionSpec]


def before_of(
    leaves: Leaves,
    local: Sequence[Any],
    targets: Sequence[Array | None],
    shards: Shards,
    scale: Array | Real,
) -> Before:
    """Return what the step reads, split as the state is."""
    specs, dense = shards.specs_of(leaves)
    gradients = as_split(pick(local, leaves.compressed), specs, shards.mesh)
    return Before(
        leaves.state.step,
        jnp.asarray(scale, jnp.float32),
        [gradient[None] for gradient in gradients],
        pick(leaves.u, leaves.compressed),
        pick(leaves.v, leaves.compressed),
        list(targets),
        as_split(pick(local, leaves.dense), dense, shards.mesh),
        pick(leaves.velocity, leaves.dense),
    )


def before_specs(compressed: Specs, dense: Specs) -> Before:
    """Return how `Before` is split, from the specs of the leaves of both kinds."""
    rows = [PartitionSpec(None, *spec) for spec in compressed]
    return Before(WHOLE, WHOLE, rows, rows, rows, list(compressed), dense, dense)


def after_specs(compressed: Specs, dense: Specs) -> After:
    """Return how `After` is split."""
    rows = [PartitionSpec(None, *spec) for spec in compressed]
    return After(WHOLE, list(compressed), rows, rows, dense, dense, WHOLE, WHOLE)


def local_step(
    before: Before, kinds: Sequence[Collection[str]], replicas: int, config: DGCConfig
) -> After:
    """Take one step with the shards of this device.

    Leaves that are split over the same axes are chosen and sent together. What several devices
    hold in common must be chosen alike by all of them, and so apart from what only one holds.

    Args:
        before: Local arrays.
        kinds: For each compressed leaf the axes over which it is split.
        replicas: N.
        config: The arguments of `scale_by_dgc`.

    Returns:
        The new arrays.
    """
    # Known before anything changes. Where it is false every new value is the old one.
    ok = finite_everywhere([*before.gradients, *before.dense], bound_axes(config.axis))
    places = list(range(len(kinds)))
    groups = [
        [place for place in places if kinds[place] == kind] for kind in dict.fromkeys(kinds)
    ] or [places]
    rest = sum(gradient.size for gradient in before.dense)
    targets, us, vs = list(before.targets), list(before.u), list(before.v)
    tables: list[tuple[Phase, ...]] = []
    for group in groups:
        sizes = [before.v[place].size for place in group]
        tables.append(plan_phases(sizes, 0 if tables else rest, replicas, config))
        work = _work(before, ok, group, tables[-1], config)
        outcome = run_phase(work, tables[-1], phase_at(before.step, tables[-1]), replicas, config)
        for place, *new in zip(group, *outcome, strict=True):
            targets[place], us[place], vs[place] = new
    directions, velocity = _dense_path(before, ok, config)
    density, sent = _report(before.step, tables, [before.v[place].size for place in places])
    return After(ok, targets, us, vs, directions, velocity, density, sent)


def _work(
    before: Before, ok: Array, group: list[int], phases: Sequence[Phase], config: DGCConfig
) -> Work:
    """Return the inputs of the phase for some leaves."""
    now = phase_at(before.step, phases)
    local = lambda rows: [as_local(x, config.axis) for x in pick(rows, tuple(group))]  # noqa: E731
    return Work(
        gradients=pick(before.gradients, tuple(group)),
        u=local(before.u),
        v=local(before.v),
        targets=pick(before.targets, tuple(group)),
        scale=before.scale,
        counts=entry_at([_int32(phase.counts) for phase in phases], now, jnp.int32),
        ok=ok,
    )


def _dense_path(before: Before, ok: Array, config: DGCConfig) -> tuple[list[Array], list[Array]]:
    """Return directions and velocities of the leaves that are too small to compress."""
    means = dense_mean(before.dense, config.axis)
    steps = [
        momentum_step(velocity, mean, config.decay)
        for velocity, mean in zip(before.velocity, means, strict=True)
    ]
    directions = [jnp.where(ok, direction, 0.0) for _, direction in steps]
    pairs = zip(steps, before.velocity, strict=True)
    return directions, [jnp.where(ok, new, old) for (new, _), old in pairs]


def _report(
    step: Count, tables: Sequence[Sequence[Phase]], sizes: Sequence[int]
) -> tuple[Scalar, Scalar]:
    """Return the density and the bytes of the running phase, of all groups of leaves."""
    rows = list(zip(*tables, strict=True))
    now = phase_at(step, tables[0])
    entries = sum(sizes) or 1
    sent = [sum(sum(phase.counts) for phase in row) for row in rows]
    density = [count / entries if sizes else 1.0 for count in sent]
    return entry_at(density, now), entry_at([sum(p.bytes_sent for p in row) for row in rows], now)


def _int32(counts: Sequence[int]) -> list[int]:
    """Return counts that fit into int32; only a dense sum takes leaves with more entries."""
    return [min(count, 2**31 - 1) for count in counts]
