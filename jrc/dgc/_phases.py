"""The phases of a run: which form the exchange takes from which step on, and what it costs."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jrc._typing import Array, Count
from jrc.dgc._config import Options
from jrc.dgc._entries import Space
from jrc.dgc._exchanges.sharded import owners_of, sharded_words
from jrc.dgc._schedule import active_levels, entries_to_send
from jrc.dgc._selectors import Blocked

BYTES_PER_WORD = 4
"""A float32 in a dense all-reduce, and a word of a payload."""

INT32_MAX = 2**31 - 1

Form = Literal["dense", "masked", "gather", "sharded"]


class Phase(NamedTuple):
    """A stretch of steps with one form of exchange.

    `dense` is the ordinary momentum of the mean gradient; `masked` a dense sum of the selected
    entries with zeros elsewhere; `gather` one of their values and positions; `sharded` sends them
    to the owners of their blocks, and the largest sums back.
    """

    start: int
    form: Form
    counts: tuple[int, ...]
    density: float
    bytes_sent: float


def ring_all_reduce_bytes(entries: int, replicas: int) -> float:
    """Bytes that one replica sends in a ring all-reduce: `2 (N - 1) / N * 4 n`."""
    return 2 * (replicas - 1) / replicas * BYTES_PER_WORD * entries


def words_of_form(
    form: Form, space: Space, counts: tuple[int, ...], replicas: int, options: Options
) -> float:
    """Words that one replica sends to each of the others, on average, for the compressed leaves.

    A ring all-reduce of n words sends `2 n / N` of them; a ring all-gather the whole payload.

    Args:
        form: The form of the exchange.
        space: The leaves.
        counts: Entries of each leaf.
        replicas: N.
        options: Wire format and selector.

    Returns:
        Words; times `N - 1` they are what the replica sends.
    """
    if form == "gather":
        return options.wire.words(sum(counts), space.blocks)
    if form == "sharded":
        selector = options.selector_for(form)
        assert isinstance(selector, Blocked)
        return sharded_words(owners_of(space, counts, selector.size, replicas), options.wire)
    return 2 * sum(space.sizes) / replicas


def form_of_level(
    space: Space, counts: tuple[int, ...], is_last: bool, replicas: int, options: Options
) -> tuple[Form, float]:
    """The form for one level, and its words: the one that was asked for, or with the fewest.

    `"auto"` shards only what is selected in blocks, for sharding drops what replicas disagree on.
    It sends the levels before the last one as dense sums, which share one program whatever their
    counts: a program for each would take several times as long to compile.

    Args:
        space: The leaves.
        counts: Entries of each leaf.
        is_last: Whether this is the level that all later steps have.
        replicas: N.
        options: Exchange, wire format and selector.

    Returns:
        The form and the words that are sent to each of the other replicas.
    """
    asked: dict[str, list[Form]] = {
        "allgather": ["gather"],
        "sharded": ["sharded"],
        "dense": ["masked"],
        # Of two that send the same, the first: nothing is gathered that could as well be added.
        "auto": ["masked", "gather"] if is_last else ["masked"],
    }
    forms = asked[options.exchange]
    if options.exchange == "auto" and is_last and isinstance(options.selector, Blocked):
        forms.append("sharded")
    words = {form: words_of_form(form, space, counts, replicas, options) for form in forms}
    best = min(forms, key=lambda form: words[form])
    return best, words[best]


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
    space, entries = Space(tuple(sizes)), sum(sizes)
    rest = ring_all_reduce_bytes(dense_entries, replicas)
    everything = ring_all_reduce_bytes(entries + dense_entries, replicas)
    before = Phase(0, "dense", tuple(sizes), 1.0, everything)
    if not sizes:
        return (before,)
    space.check()
    phases = [before] if options.rampup_begin_step > 0 else []
    levels = active_levels(options.rampup_begin_step, options.rampup_step, options.sparsity)
    for start, level in levels:
        counts = tuple(entries_to_send(size, level, options.count_dtype) for size in sizes)
        form, words = form_of_level(space, counts, start == levels[-1][0], replicas, options)
        cost = (replicas - 1) * BYTES_PER_WORD * words + rest
        phases.append(Phase(start, form, counts, sum(counts) / entries, cost))
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
