"""Rounds: replicas take steps of their own, and exchange what they changed at the end of a round.

The time line of a run with `sync_every=3`, in steps; `E` is the exchange, `A` its result:

    overlap=0   | step | step | step E A | step | step | step E A |
    overlap=1   | step | step | step     | E step A | step | step | E step A

Several programs are compiled: the inner step has no collective between replicas, and with several
fragments there is one step that exchanges each. Which one runs is known on the host from the number
of the step, so that none holds the others' collectives.

A replica may be split over several devices. XLA splits the inner step. An exchange must not be: a
message is made of the shards of one device, and goes to the devices with the same shards in the
other replicas (`Layout.on_devices`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jrc._layout import Layout, check_whole
from jrc._nonfinite import chosen, stays_finite
from jrc._tree import named_leaves
from jrc._typing import PyTree, Transform
from jrc._validate import whole_number
from jrc.dgc._internal import dgc_states
from jrc.outer_optimizers import LocalState, OuterOptimizer, OuterState
from jrc.outer_optimizers._internal import (
    INNER,
    Fragment,
    Packet,
    Turn,
    as_rows,
    bytes_of_exchange,
    cut_to,
    fragment_count,
    header_words,
    overlap_of,
    padded,
    row_of,
    turn_at,
)
from jrc.train._loss import Gradient, Objective
from jrc.train._state import TrainState
from jrc.train._synchronisation.exchange import Arrived, applied, exchanged, packed
from jrc.train._synchronisation.mean import mean_step
from jrc.train._synchronisation.outer_state import (
    first_outer_state,
    outer_state_specs,
    split_fragments,
)
from jrc.train._synchronisation.protocol import Synchronisation, Traffic
from jrc.train._synchronisation.replicas import Replicas, norm_of


@dataclasses.dataclass(frozen=True)
class Rounds(Synchronisation):
    """Replicas train with `tx` alone, and exchange differences by an outer optimizer.

    Attributes:
        outer: The outer optimizer; `tx` is the inner one.
    """

    outer: OuterOptimizer

    reports_rows = True
    options = ("closing", "number")
    made_by = "jrc.init_state(params, tx, key, outer=outer)"

    @property
    def made_for(self) -> str:
        """What a state must be built for."""
        return f"tx and outer={self.outer!r}"

    @classmethod
    def of(
        cls, tx: Transform, outer: OuterOptimizer | None, opt_state: PyTree
    ) -> Synchronisation | None:
        """Return the value where there is an outer optimizer."""
        del opt_state
        return None if outer is None else cls(tx, outer)

    def check(self, params: PyTree, model_state: PyTree, opt_state: PyTree, layout: Layout) -> None:
        """Raise if `tx` compresses, a parameter is complex, or an array split over the replicas."""
        if dgc_states(opt_state):
            raise ValueError(
                "tx must not compress gradients beside outer=, whose inner steps "
                "exchange nothing, got one with jrc.scale_by_dgc. Pass a plain optimizer, such as "
                "optax.adamw(1e-3), or leave outer= out."
            )
        for name, leaf in named_leaves(params):
            if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
                raise ValueError(
                    "params must be real with outer=, which exchanges float32, got "
                    f"{jnp.result_type(leaf)} at {name!r}. Keep its real and its imaginary part as "
                    "two arrays, and join them in the loss function."
                )
        rule = "with outer=, whose replicas train on their own"
        for what, tree in (("params", params), ("model_state", model_state)):
            check_whole(layout.specs(tree, what), layout.names, what, rule)
        split_fragments(params, fragment_count(self.outer), layout)

    def init(
        self,
        params: PyTree,
        model_state: PyTree,
        opt_state: PyTree,
        layout: Layout,
        shapes: bool = False,
    ) -> OuterState:
        """Return the state before the first round."""
        return first_outer_state(self.outer, params, model_state, opt_state, layout, shapes)

    def opt_specs(self, state: TrainState, layout: Layout) -> OuterState:
        """Return how its state lies: what replicas have of their own has a row for each of them."""
        return outer_state_specs(state, layout)

    def program(self, number: Callable[[], int]) -> Turn:
        """Return whether a round ends with this step, and that of which fragment."""
        return turn_at(self.outer, number())

    def lowered(self, closing: bool = True, number: int | None = None) -> Turn:
        """Return the program of a step; that which exchanges the last fragment needs most memory.

        Args:
            closing: Whether a round ends; `False` is the inner step.
            number: The number of the step, whatever it does.
        """
        if number is not None:
            remedy = "The first step is 1."
            least = whole_number(number, "number", least=1, remedy=remedy)
            return turn_at(self.outer, least)
        last = int(self.outer.sync_every) + overlap_of(self.outer)
        return turn_at(self.outer, last) if closing else INNER

    def step(
        self, program: Turn, state: TrainState, objective: Objective, over: Replicas
    ) -> tuple[TrainState, Traffic]:
        """Return the state after the step of a replica, and of the exchange if a round ends."""
        # Without barriers XLA's CPU compiler makes the rows' reshapes part of its fusions, which
        # then copy every leaf and cannot write it in place.
        own = lax.optimization_barrier(row_of(state.opt_state.local))
        round_ = _Round(self.outer, state, over.layout, over.first)
        before, flight, arrived = state, own.in_flight, None
        if flight is not None:
            # Nothing below depends on it until the inner step is done.
            arrived = round_.exchanged(program.receives, own, flight)
        own, found = self._inner_step(own, objective, over.inside)
        if flight is None:
            packet, own = round_.packed(program.sends, own)
            arrived = round_.exchanged(program.receives, own, packet)
        state, own = round_.applied(program.receives, own, arrived)
        if flight is not None:
            packet, own = dataclasses.replace(round_, state=state).packed(program.sends, own)
            own = own._replace(in_flight=round_.waiting(packet, flight))
        traffic = _traffic(round_, program, before, state, found, over)
        local = as_rows(lax.optimization_barrier(own))
        return state._replace(opt_state=state.opt_state._replace(local=local)), traffic

    def _inner_step(
        self, own: LocalState, objective: Objective, inner: Replicas
    ) -> tuple[LocalState, Gradient]:
        """Return what a replica has after a step of its own, and the gradient of that step.

        A step that is not finite changes nothing.

        Args:
            own: What the replica has.
            objective: The loss over its batch, and its gradient.
            inner: The reductions inside of the replica.
        """
        after, found, loss = mean_step(self.tx, own, objective, inner)
        loss, norm = loss.astype(jnp.float32), inner.mean(norm_of(found.grads))
        good = stays_finite(loss, after.params, own.model_state, after.model_state)
        own = chosen(good, after, own)._replace(
            loss=own.loss + jnp.where(good, loss, 0.0),
            grad_norm=own.grad_norm + jnp.where(good, norm, 0.0),
            steps=own.steps + 1,
            failed=jnp.where(good, own.failed, fragment_count(self.outer)).astype(jnp.int32),
        )
        return own, found


@dataclasses.dataclass(frozen=True, eq=False)
class _Round:
    """The parts of a round, each on the shards of a device.

    Attributes:
        outer: The outer optimizer.
        state: What replicas share.
        layout: How a replica is split.
        axis: The axis of the replicas.
    """

    outer: OuterOptimizer
    state: TrainState
    layout: Layout
    axis: str | None

    @functools.cached_property
    def specs(self) -> TrainState:
        """The specs of the state over the axes inside of a replica, rows without their axis."""
        specs = self.layout.state
        if specs is None:
            return jax.tree.map(lambda _: PartitionSpec(), self.state)
        own = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs.opt_state.local)
        local = specs.opt_state._replace(local=own)
        return self.layout.within(specs._replace(opt_state=local))

    @property
    def own(self) -> LocalState:
        """The specs of what an exchange reads and writes of what a replica has."""
        return _in_exchange(self.specs.opt_state.local)

    @property
    def packets(self) -> Any:
        """The specs of a packet: each device has one of its own."""
        each: Any = PartitionSpec(self.layout.inside)
        return Packet(each, each)

    @property
    def arrivals(self) -> Any:
        """The specs of what arrives: rows for all replicas, or one sum."""
        rows: Any = PartitionSpec(None, self.layout.inside)
        one: Any = PartitionSpec(self.layout.inside)
        whole: Any = PartitionSpec()
        return Arrived(rows, one if self.outer.collective == "all_reduce" else rows, whole)

    def shapes(self, name: str) -> PyTree:
        """Return the shapes of a device's shards of the state's `params` or `model_state`."""
        tree = getattr(self.state, name)
        if self.layout.params is None:
            return tree
        return self.layout.shard(tree, getattr(self.specs, name))

    def fragment(self, index: int) -> Fragment:
        """Return a fragment of the parameters."""
        return split_fragments(self.state.params, fragment_count(self.outer), self.layout)[index]

    def words(self, index: int) -> tuple[int, PyTree]:
        """Return the words of a fragment's header, and the shapes of a device's part of it."""
        fragment = self.fragment(index)
        part = fragment.shapes(self.shapes("params"))
        return header_words(fragment, self.shapes("model_state")), part

    def packed(self, index: int | None, own: LocalState) -> tuple[Packet | None, LocalState]:
        """Return the packet of a fragment, if there is one to send, and what the replica keeps."""
        if index is None:
            return None, own
        run = functools.partial(packed, self.outer, self.fragment(index), self.layout)
        ins, outs = (self.specs.params, self.own), (self.packets, self.own)
        packet, new = self.layout.on_devices(run, ins, outs)(self.state.params, _in_exchange(own))
        return packet, _joined(new, own)

    def exchanged(
        self, index: int | None, own: LocalState, packet: Packet | None
    ) -> Arrived | None:
        """Exchange a packet, which may be longer than what it has, if there is one to receive."""
        if index is None or packet is None:
            return None
        header, part = self.words(index)
        message = self.outer.message_words(part)

        def run(packet: Packet, model_state: PyTree) -> Arrived:
            own = cut_to(packet, header, message)
            return exchanged(self.outer, self.fragment(index), self.axis, own, model_state)

        ins = self.packets, self.specs.model_state
        return self.layout.on_devices(run, ins, self.arrivals)(packet, own.model_state)

    def applied(
        self, index: int | None, own: LocalState, arrived: Arrived | None
    ) -> tuple[TrainState, LocalState]:
        """Return what is shared and what a replica has after an exchange, if there was one."""
        if index is None or arrived is None:
            return self.state, own
        run = functools.partial(applied, self.outer, self.fragment(index))
        specs = _shared(self.specs), self.own
        run = self.layout.on_devices(run, (*specs, self.arrivals), specs)
        state, new = run(_shared(self.state), _in_exchange(own), arrived)
        return state, _joined(new, own)

    def waiting(self, packet: Packet | None, longest: Packet) -> Packet:
        """Return a packet as long as the longest one; zeros for none."""
        if packet is None:
            return jax.tree.map(jnp.zeros_like, longest)
        ins = self.packets, self.packets
        return self.layout.on_devices(padded, ins, self.packets)(packet, longest)


def _shared(state: TrainState) -> TrainState:
    """Return what replicas share of a state."""
    return state._replace(opt_state=state.opt_state._replace(local=None))


def _in_exchange(own: LocalState) -> LocalState:
    """Return what an exchange reads and writes of what a replica has."""
    return own._replace(opt_state=None, in_flight=None)


def _joined(new: LocalState, own: LocalState) -> LocalState:
    """Return what a replica has after an exchange, with what the exchange has not read."""
    return new._replace(opt_state=own.opt_state, in_flight=own.in_flight)


def _traffic(
    round_: _Round,
    turn: Turn,
    before: TrainState,
    after: TrainState,
    found: Gradient,
    over: Replicas,
) -> Traffic:
    """Return what a step has sent: means over the inner axis, and a message if a round ends."""
    report, synchronised = after.opt_state.report, turn.receives is not None
    left_out = report.left_out - before.opt_state.report.left_out
    sent, density = over.inside.bytes_of_mean(found.grads), 0.0
    if turn.receives is not None:
        words, part = round_.words(turn.receives)
        sent += bytes_of_exchange(round_.outer, part, words, over.rows)
        size = sum(x.size for x in jax.tree.leaves(round_.shapes("params")))
        density = round_.outer.entries_sent(part) / max(size, 1)
    skipped = left_out == over.rows
    return Traffic(
        found,
        sent,
        density,
        skipped,
        synchronised=synchronised,
        left_out=left_out,
        round=report,
    )
