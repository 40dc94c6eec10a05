"""The state between two inner steps: what replicas share, and what each has of its own."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrc._text import brief
from jrc._typing import Array, Count, PyTree, Scalar
from jrc.outer_optimizers._fragments import Fragment, overlap_of
from jrc.outer_optimizers._packets import Packet, empty_packet
from jrc.outer_optimizers._protocol import OuterOptimizer


class RoundReport(NamedTuple):
    """What is known of the last round, equal on every replica.

    With fragments a round is that of a fragment, and its inner steps are those since the exchange
    of the fragment before.

    Attributes:
        loss: Mean loss of its inner steps over the replicas that took part, `float32[]`; NaN
            before the first round.
        grad_norm: Mean of the L2 norms of their gradients, `float32[]`.
        kept: Sum of the squares of what the replicas have not sent, after the last round of each
            fragment in which they took part, `float32[fragments]`.
        left_out: Replicas whose contribution was left out of all rounds so far, `int32[]`.
    """

    loss: Scalar
    grad_norm: Scalar
    kept: Array
    left_out: Count

    @property
    def norm_kept(self) -> Scalar:
        """L2 norm of what the replicas have not sent, `float32[]`."""
        return jnp.sqrt(self.kept.sum())

    def __repr__(self) -> str:
        return brief(self)


class LocalState(NamedTuple):
    """What each replica has of its own; every array has a leading axis of replicas.

    Attributes:
        params: The parameters that the replica trains.
        model_state: Running statistics and the like; `None` without.
        opt_state: The state of the inner optimizer.
        outer: The state of the outer optimizer: what was not sent (`SparseLoCo`), or `None`; with
            several fragments a tuple of them.
        loss: Sum of the losses since the replica last made a message, `float32[replicas]`.
        grad_norm: Sum of the gradients' L2 norms likewise.
        steps: Number of inner steps since then, `int32[replicas]`.
        failed: The next messages that will not count, because a step was not finite and changed
            nothing: one of each fragment, `int32[replicas]`.
        in_flight: With `overlap=1` the message that the next step exchanges, or zeros.
    """

    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    outer: PyTree
    loss: Array
    grad_norm: Array
    steps: Array
    failed: Array
    in_flight: Packet | None

    def __repr__(self) -> str:
        return brief(self)


class OuterState(NamedTuple):
    """The `opt_state` of a train state with `outer=`.

    Attributes:
        rounds: Rounds so far, those of each fragment, `int32[]`.
        shared: The outer optimizer's state that all replicas share: momentum (`DiLoCo`), or `None`;
            with several fragments a tuple of them.
        report: What is known of the last round.
        local: What each replica has of its own.
    """

    rounds: Count
    shared: PyTree
    report: RoundReport
    local: LocalState

    def __repr__(self) -> str:
        return brief(self)


class Kept(NamedTuple):
    """What an outer optimizer keeps between two steps.

    Attributes:
        local: Of one replica; with several fragments a tuple.
        shared: What all replicas share, likewise.
        in_flight: With `overlap=1` the message that the next step exchanges.
    """

    local: PyTree
    shared: PyTree
    in_flight: Packet | None


def first_kept(
    outer: OuterOptimizer, fragments: Sequence[Fragment], params: PyTree, model_state: PyTree
) -> Kept:
    """Return what an outer optimizer keeps before the first step.

    Args:
        outer: The outer optimizer.
        fragments: The parts of the parameters.
        params: The parameters of one replica, or the shards of one device.
        model_state: Its model state, or `None`.
    """
    pairs = [outer.init(each.of(params)) for each in fragments]
    local, shared = zip(*pairs, strict=True) if len(fragments) > 1 else pairs[0]
    if not overlap_of(outer):
        return Kept(local, shared, None)
    return Kept(local, shared, empty_packet(outer, fragments, params, model_state))


def initial_state(
    kept: Kept, fragments: int, params: PyTree, model_state: PyTree, opt_state: PyTree
) -> OuterState:
    """Return the state before the first step, with one row for one replica.

    Args:
        kept: What the outer optimizer keeps.
        fragments: The number of fragments.
        params: The parameters of one replica.
        model_state: Its model state, or `None`.
        opt_state: The first state of the inner optimizer.

    Returns:
        The state.
    """
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    own = LocalState(
        params, model_state, opt_state, kept.local, zero, zero, none, none, kept.in_flight
    )
    squares = jnp.zeros(fragments, jnp.float32)
    report = RoundReport(jnp.full((), jnp.nan, jnp.float32), zero, squares, none)
    return OuterState(none, kept.shared, report, as_rows(own))


def as_rows(tree: PyTree) -> PyTree:
    """Return the state of one replica as a row, with a leading axis of one."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def row_of(tree: PyTree) -> PyTree:
    """Return the state of one replica from its row."""
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)
