"""The phases of a run: which form the exchange takes from which step on, and what it costs."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jrc._typing import Array, Count
from jrc.dgc._options import Options
from jrc.dgc._schedule import active_levels, entries_to_send

BYTES_PER_VALUE = 4
"""A float32 in a dense all-reduce."""

BYTES_PER_ENTRY = 8
"""A float32 value and its int32 index in a payload."""

INT32_MAX = 2**31 - 1

Form = Literal["dense", "masked", "sparse"]


class Phase(NamedTuple):
    """A stretch of steps with one form of exchange.

    `dense` is the ordinary momentum of the mean gradient; `masked` a dense sum of the selected
    entries with zeros elsewhere; `sparse` a gather of values and indices.
    """

    start: int
    form: Form
    counts: tuple[int, ...]
    density: float
    bytes_sent: float


def ring_all_reduce_bytes(entries: int, replicas: int) -> float:
    """Bytes that one replica sends in a ring all-reduce: `2 (N - 1) / N * 4 n`."""
    return 2 * (replicas - 1) / replicas * BYTES_PER_VALUE * entries


def ring_all_gather_bytes(entries: int, replicas: int) -> float:
    """Bytes that one replica sends in a ring all-gather of its payload: `(N - 1) * 8 k`."""
    return float((replicas - 1) * BYTES_PER_ENTRY * entries)


def form_of_level(sent: int, entries: int, replicas: int, exchange: str) -> Form:
    """The form for one level; `auto` is sparse where the payload costs less than a dense sum.

    `(N - 1) * 8 k < 2 (N - 1) / N * 4 n` is `k N < n`, which also decides for one replica.

    Args:
        sent: k, entries sent of all compressed leaves.
        entries: n, their size.
        replicas: N.
        exchange: `"allgather"`, `"dense"` or `"auto"`.

    Returns:
        `"sparse"` or `"masked"`.
    """
    forced: dict[str, Form] = {"allgather": "sparse", "dense": "masked"}
    return forced.get(exchange, "sparse" if sent * replicas < entries else "masked")


def plan_phases(
    sizes: Sequence[int], dense_entries: int, replicas: int, options: Options
) -> tuple[Phase, ...]:
    """All phases that can run, in the order of their steps; the first starts at step 0.

    Args:
        sizes: Entries of each compressed leaf.
        dense_entries: Entries of all leaves on the dense path together.
        replicas: N.
        options: Schedule and exchange.

    Returns:
        At least one phase.
    """
    entries = sum(sizes)
    rest = ring_all_reduce_bytes(dense_entries, replicas)
    everything = ring_all_reduce_bytes(entries + dense_entries, replicas)
    before = Phase(0, "dense", tuple(sizes), 1.0, everything)
    if not sizes:
        return (before,)
    phases = [before] if options.rampup_begin_step > 0 else []
    for start, level in active_levels(
        options.rampup_begin_step, options.rampup_step, options.sparsity
    ):
        counts = tuple(entries_to_send(size, level) for size in sizes)
        sent = sum(counts)
        form = form_of_level(sent, entries, replicas, options.exchange)
        sparse = ring_all_gather_bytes(sent, replicas) + rest
        cost = sparse if form == "sparse" else everything
        phases.append(Phase(start, form, counts, sent / entries, cost))
    return tuple(phases)


def phase_at(step: Count, phases: Sequence[Phase]) -> Count:
    """Index of the phase that a step belongs to.

    Args:
        step: Update counter, int32.
        phases: From `plan_phases`.

    Returns:
        The index, int32.
    """
    started = [step >= min(phase.start, INT32_MAX) for phase in phases[1:]]
    return sum((begun.astype(jnp.int32) for begun in started), start=jnp.int32(0))


def entry_at(column: Sequence[Any], now: Count, dtype: Any = jnp.float32) -> Array:
    """The row of a static table, one row for each phase, that belongs to the running phase."""
    if len(column) == 1:
        return jnp.asarray(column[0], dtype)
    return jnp.asarray(column, dtype)[now]
