"""The state between two inner steps: what replicas share, and what each has of its own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrc._text import brief
from jrc._typing import Array, Count, PyTree, Scalar
from jrc.outer_optimizers._protocol import OuterOptimizer


class RoundReport(NamedTuple):
    """What is known of the last round, equal on every replica.

    Attributes:
        loss: Mean loss of its inner steps over the replicas that took part, `float32[]`; NaN
            before the first round.
        grad_norm: Mean of the L2 norms of their gradients, `float32[]`.
        norm_kept: L2 norm of what all replicas have not sent, `float32[]`.
        left_out: Replicas whose contribution was left out of all rounds so far, `int32[]`.
    """

    loss: Scalar
    grad_norm: Scalar
    norm_kept: Scalar
    left_out: Count

    def __repr__(self) -> str:
        return brief(self)


class LocalState(NamedTuple):
    """What each replica has of its own; every array has a leading axis of replicas.

    Attributes:
        params: The parameters that the replica trains.
        model_state: Running statistics and the like; `None` without.
        opt_state: The state of the inner optimizer.
        outer: The state of the outer optimizer: what was not sent (`SparseLoCo`), or `None`.
        loss: Sum of the losses since the last round, `float32[replicas]`.
        grad_norm: Sum of the gradients' L2 norms likewise.
        steps: Number of them, `int32[replicas]`.
        failed: How many of them were not finite and changed nothing, `int32[replicas]`.
    """

    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    outer: PyTree
    loss: Array
    grad_norm: Array
    steps: Array
    failed: Array

    def __repr__(self) -> str:
        return brief(self)


class OuterState(NamedTuple):
    """The `opt_state` of a train state with `outer=`.

    Attributes:
        rounds: Rounds so far, `int32[]`.
        shared: The outer optimizer's state that all replicas share: momentum (`DiLoCo`), or `None`.
        report: What is known of the last round.
        local: What each replica has of its own.
    """

    rounds: Count
    shared: PyTree
    report: RoundReport
    local: LocalState

    def __repr__(self) -> str:
        return brief(self)


def initial_state(
    outer: OuterOptimizer, params: PyTree, model_state: PyTree, opt_state: PyTree
) -> OuterState:
    """Return the state before the first step, with one row for one replica.

    Args:
        outer: The outer optimizer.
        params: The parameters of one replica.
        model_state: Its model state, or `None`.
        opt_state: The first state of the inner optimizer.

    Returns:
        The state.
    """
    local, shared = outer.init(params)
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    own = LocalState(params, model_state, opt_state, local, zero, zero, none, none)
    report = RoundReport(jnp.full((), jnp.nan, jnp.float32), zero, zero, none)
    return OuterState(none, shared, report, as_rows(own))


def as_rows(tree: PyTree) -> PyTree:
    """Return the state of one replica as a row, with a leading axis of one."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def row_of(tree: PyTree) -> PyTree:
    """Return the state of one replica from its row."""
    return jax.tree.map(lambda x: x[0], tree)
