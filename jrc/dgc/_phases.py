"""The phases of a run: from which step on which entries are sent, how, and at what cost."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jrc._ring import ring_all_reduce_bytes
from jrc._typing import Array, Count, Scalar
from jrc.dgc._config import DGCConfig
from jrc.dgc._entries import Space, buckets_of, fits
from jrc.dgc._exchanges import (
    AllGather,
    Auto,
    DenseSum,
    EntryExchange,
    Exchange,
    Sharded,
    Transfer,
)
from jrc.dgc._schedule import active_levels, entries_to_send
from jrc.dgc._selectors import Blocked

BYTES_PER_WORD = 4

INT32_MAX = 2**31 - 1


class Phase(NamedTuple):
    """A range of steps with one exchange and one number of entries for each leaf.

    Attributes:
        start: The first step.
        exchange: How the entries are exchanged. `None` means the steps before
            `rampup_begin_step`: ordinary momentum of the mean gradient, nothing compressed.
        counts: Entries that are sent of each compressed leaf.
        density: Share of the compressed leaves' entries that are sent.
        bytes_sent: Bytes that one replica sends in a step, of all leaves.
        transfers: Which leaves are sent together, and what of them.
    """

    start: int
    exchange: Exchange | None
    counts: tuple[int, ...]
    density: float
    bytes_sent: float
    transfers: tuple[tuple[slice, Transfer], ...] = ()


def plan_phases(
    sizes: Sequence[int], dense_entries: int, replicas: int, config: DGCConfig
) -> tuple[Phase, ...]:
    """Return all phases that can run, in the order of their steps; the first starts at step 0.

    Args:
        sizes: Entries of each compressed leaf.
        dense_entries: Entries of all leaves on the dense path together.
        replicas: N.
        config: Schedule and exchange.

    Returns:
        At least one phase.
    """
    entries = sum(sizes)
    rest = ring_all_reduce_bytes(dense_entries, replicas)
    everything = ring_all_reduce_bytes(entries + dense_entries, replicas)
    before = Phase(0, None, tuple(sizes), 1.0, everything)
    if not sizes:
        return (before,)
    phases = [before] if config.rampup_begin_step > 0 else []
    begin, length = int(config.rampup_begin_step), int(config.rampup_step)
    levels = active_levels(begin, length, config.sparsity)
    for start, level in levels:
        counts = tuple(entries_to_send(size, level, config.count_dtype) for size in sizes)
        is_last = start == levels[-1][0]
        given = sizes, counts, is_last, replicas, config
        exchange, words, transfers = exchange_of_level(*given)
        cost = (replicas - 1) * BYTES_PER_WORD * words + rest
        phases.append(Phase(start, exchange, counts, sum(counts) / entries, cost, transfers))
    return tuple(phases)


def exchange_of_level(
    sizes: Sequence[int], counts: Sequence[int], is_last: bool, replicas: int, config: DGCConfig
) -> tuple[Exchange, float, tuple[tuple[slice, Transfer], ...]]:
    """Return the exchange of one sparsity level, words to each other replica, and transfers.

    Args:
        sizes: Entries of each compressed leaf.
        counts: Entries that are sent of each.
        is_last: Whether this is the level of all later steps.
        replicas: N.
        config: Exchange, wire format and selector.

    Returns:
        The exchange, its words and its transfers; for `"auto"` the one with the fewest words, see
        `Auto`.
    """
    # Of two that send the same, the first: nothing is gathered that could as well be added.
    candidates: list[Exchange] = [config.exchange]
    if isinstance(config.exchange, Auto):
        candidates = [DenseSum()]
        if is_last and all(map(fits, sizes)):
            candidates.append(AllGather())
            if isinstance(config.selector, Blocked):
                candidates.append(Sharded())
    transfers = [transfers_of(each, sizes, counts, replicas, config) for each in candidates]
    words = [
        sum(exchange.words(transfer) for _, transfer in parts)
        for exchange, parts in zip(candidates, transfers, strict=True)
    ]
    best = words.index(min(words))
    return candidates[best], words[best], transfers[best]


def transfers_of(
    exchange: Exchange,
    sizes: Sequence[int],
    counts: Sequence[int],
    replicas: int,
    config: DGCConfig,
) -> tuple[tuple[slice, Transfer], ...]:
    """Return the transfers of one step: which leaves each one takes, and what it sends of them.

    Args:
        exchange: How entries are exchanged.
        sizes: Entries of each compressed leaf.
        counts: Entries that are sent of each.
        replicas: N.
        config: Wire format, selector and axis.

    Returns:
        One pair where the positions of all leaves fit into 31 bits, or no positions are sent.

    Raises:
        ValueError: For a leaf that is too large for an exchange of entries.
    """
    sparse = isinstance(exchange, EntryExchange)
    buckets = buckets_of(sizes) if sparse else (slice(0, len(sizes)),)
    selector = config.selector_for(exchange)
    return tuple(
        (
            part,
            Transfer(
                Space(tuple(sizes[part])),
                tuple(counts[part]),
                selector,
                config.wire,
                replicas,
                config.axis,
            ),
        )
        for part in buckets
    )


def phase_at(step: Count, phases: Sequence[Phase]) -> Count:
    """Return the index of the phase that a step belongs to.

    Args:
        step: Update counter, int32.
        phases: From `plan_phases`.

    Returns:
        The index, int32.
    """
    started = [step >= min(phase.start, INT32_MAX) for phase in phases[1:]]
    return sum((begun.astype(jnp.int32) for begun in started), start=jnp.int32(0))


def entry_at(column: Sequence[Any], now: Count, dtype: Any = jnp.float32) -> Array:
    """Return the row of a static table, one row for each phase, of the running phase."""
    if len(column) == 1:
        return jnp.asarray(column[0], dtype)
    return jnp.asarray(column, dtype)[now]


def sent_by(now: Count, tables: Sequence[Sequence[Phase]], entries: int) -> tuple[Scalar, Scalar]:
    """Return the density and the bytes of the running phase, of all groups of leaves.

    Args:
        now: Update counter, int32.
        tables: The phases of each group, from `plan_phases`.
        entries: Entries of all compressed leaves.
    """
    rows = list(zip(*tables, strict=True))
    at = phase_at(now, tables[0])
    density = [
        sum(sum(phase.counts) for phase in row) / entries if entries else 1.0 for row in rows
    ]
    return entry_at(density, at), entry_at([sum(p.bytes_sent for p in row) for row in rows], at)
