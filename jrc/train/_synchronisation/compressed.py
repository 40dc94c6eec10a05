"""Compressed gradients: `tx` holds a compression, gets local gradients and exchanges them itself.

What of the gradients no compression serves, as `optax.masked` leaves some out, is averaged.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jrc._extra_arguments import takes_extra_arguments
from jrc._layout import Layout, check_whole
from jrc._nonfinite import chosen, finite_everywhere
from jrc._typing import Array, PyTree, Transform
from jrc.dgc import apply_gradients
from jrc.dgc._internal import applies_in_place, dgc_states, served, state_specs, with_states
from jrc.outer_optimizers import OuterOptimizer
from jrc.train._loss import Objective
from jrc.train._optax import differentiated, update
from jrc.train._state import TrainState
from jrc.train._synchronisation.compressed_chain import check_first, check_wrappers
from jrc.train._synchronisation.protocol import Synchronisation, Traffic
from jrc.train._synchronisation.replicas import Replicas


class CompressedGradients(Synchronisation):
    """Replicas exchange the largest entries of what each has gathered (DGC, EF21)."""

    @classmethod
    def of(
        cls, tx: Transform, outer: OuterOptimizer | None, opt_state: PyTree
    ) -> Synchronisation | None:
        """Return the value for a transform whose state has a compression."""
        del outer
        return cls(tx) if dgc_states(opt_state) else None

    def check(self, params: PyTree, model_state: PyTree, opt_state: PyTree, layout: Layout) -> None:
        """Raise if parameters are split over the replicas, or another transform does not go."""
        del params, model_state
        check_first(opt_state)
        rule = f"of the compressed axis {layout.replicas!r}"
        check_whole(layout.params, layout.names, "params", rule)
        if layout.parts > 1:
            check_wrappers(self.tx, opt_state)

    def opt_specs(self, state: TrainState, layout: Layout) -> PyTree:
        """Return how its state lies: u and v have a row for each replica."""
        trees = differentiated(state.params), differentiated(layout.params)
        return state_specs(state.opt_state, layout.replicas, *trees)

    def step(
        self, program: Any, state: TrainState, objective: Objective, over: Replicas
    ) -> tuple[TrainState, Traffic]:
        """Return the state after the exchange, or that before if a gradient was not finite."""
        del program
        found = objective.gradient(differentiated(state.params), state.model_state)
        own = served(found.grads, dgc_states(state.opt_state))
        grads = jax.tree.map(lambda g, own: g if own else over.mean(g), found.grads, own)
        gathers = isinstance(state.opt_state, optax.MultiStepsState)
        if gathers:
            grads = jax.tree.map(lambda g, own: _storable(g, over) if own else g, grads, own)
        extra = {"value": over.mean(found.loss)} if takes_extra_arguments(self.tx) else {}
        if over.layout.params is not None:
            extra["param_specs"] = differentiated(over.layout.params)
        before = state._replace(opt_state=_with_nothing_sent(state.opt_state))
        params, opt_state, skipped = self._updated(before, grads, over, extra)
        model_state = jax.tree.map(over.shared, found.model_state)
        model_state = chosen(~skipped, model_state, state.model_state)
        after = state._replace(params=params, model_state=model_state, opt_state=opt_state)
        density, sent = _sent(opt_state, found.grads, over)
        sent += over.bytes_of_mean(_only(found.grads, own, False))
        # `MultiSteps` gathers the mean over the inner axis.
        sent += over.inside.bytes_of_mean(_only(found.grads, own, True)) if gathers else 0.0
        unsent = optax.tree.norm([each.v for each in dgc_states(opt_state)], squared=True)
        return after, Traffic(found, sent, density, skipped, unsent)

    def _updated(
        self, state: TrainState, grads: PyTree, over: Replicas, extra: dict[str, Any]
    ) -> tuple[PyTree, PyTree, Array]:
        """Return parameters and optimizer state after the update, and whether it was skipped."""
        tx = self.tx
        if applies_in_place(tx):
            # It skips by itself, and writes only the parameter entries that were sent.
            specs = extra.get("param_specs")
            given = grads, state.opt_state, state.params
            params, opt_state = apply_gradients(tx, *given, param_specs=specs)
            ((old,), (new,)) = dgc_states(state.opt_state), dgc_states(opt_state)
            return params, opt_state, new.skipped != old.skipped

        def step() -> tuple[PyTree, PyTree]:
            gathers = isinstance(state.opt_state, optax.MultiStepsState)
            stepped = _mini_step if gathers else update
            updates, opt_state = stepped(tx, grads, state.opt_state, state.params, extra)
            return optax.apply_updates(state.params, updates), opt_state

        # Computed before the update, so that the whole chain skips the step, and over all replicas,
        # so that all take the same branch: there are collectives in it.
        ok = finite_everywhere(grads, over.axis or ())
        skip = lambda: (state.params, _count_skipped(state.opt_state))  # noqa: E731
        params, opt_state = jax.lax.cond(ok, step, skip)
        return params, opt_state, ~ok


def _mini_step(
    tx: Transform, grads: PyTree, opt_state: Any, params: PyTree, extra: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """Return the updates of an `optax.MultiSteps` and its state, sending nothing in between.

    `MultiSteps` calls the inner transform in each mini-step and drops what it returns; the exchange
    would run k times for one update.
    """
    # Only the counters and the gathered gradients are read: XLA drops the exchange.
    updates, waiting = update(tx, grads, opt_state, params, extra)
    emits = waiting.gradient_step != opt_state.gradient_step
    kept = waiting._replace(inner_opt_state=opt_state.inner_opt_state)
    return jax.lax.cond(
        emits,
        lambda: update(tx, grads, opt_state, params, extra),
        lambda: (jax.tree.map(jnp.zeros_like, updates), kept),
    )


def _storable(x: Any, over: Replicas) -> Any:
    """Reduce a gradient so that it is equal where the state that gathers it is shared."""
    return over.inside.mean(x) if jnp.ndim(x) else over.mean(x)


def _only(grads: PyTree, own: PyTree, is_own: bool) -> PyTree:
    """Return the gradients that a compression serves or does not, `None` in the others' place."""
    return jax.tree.map(lambda g, own: g if own == is_own else None, grads, own)


def _with_nothing_sent(opt_state: PyTree) -> PyTree:
    """Return the state with compressions that sent nothing: those that run write what they send."""
    zero = jnp.zeros((), jnp.float32)
    return with_states(opt_state, lambda x: x._replace(density=zero, bytes_sent=zero))


def _count_skipped(opt_state: PyTree) -> PyTree:
    """Return the optimizer's state with one more skipped step in each compression."""
    more = lambda x: x._replace(skipped=optax.safe_increment(x.skipped))  # noqa: E731
    return with_states(opt_state, more)


def _sent(opt_state: PyTree, grads: PyTree, over: Replicas) -> tuple[Array, Array]:
    """Return density and bytes of all compressions, their means over the inner axis included."""
    density, sent, entries = jnp.zeros(()), jnp.zeros(()), 0
    for state in dgc_states(opt_state):
        size = sum(v.size for v in jax.tree.leaves(state.v))
        means = over.inside.bytes_of_mean(_only(grads, served(grads, [state]), True), itemsize=4)
        sent += state.bytes_sent + jnp.where(state.density > 0, means, 0.0)
        density += size * state.density
        entries += size
    return (density / entries if entries else jnp.ones(())), sent
