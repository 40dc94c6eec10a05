"""The checks before each step, in order.

All of them run at the first call. A state of another structure, or with other shapes or dtypes, is
checked whole again.
"""

from typing import Any

import jax

from jrc._multihost import all_or_none
from jrc._tree import aval_of, has_tracers, tree_difference
from jrc._typing import PyTree, Transform
from jrc.dgc._internal import dgc_states, without_axes
from jrc.outer_optimizers import OuterOptimizer
from jrc.train._optax import check_structure
from jrc.train._preflight.batch import SameBatch, check_batch, check_batch_of_processes
from jrc.train._preflight.compression_axis import check_compression_axis
from jrc.train._preflight.idle_axes import check_every_axis
from jrc.train._preflight.partitioner_aborts import warn_of_lookups
from jrc.train._preflight.state import (
    check_devices,
    check_form,
    check_leaves,
    check_rows,
    check_split,
)
from jrc.train._runners import Programs, form_of
from jrc.train._state import TrainState
from jrc.train._synchronisation import Synchronisation, synchronisation_of
from jrc.train._synchronisation.compressed_chain import check_mixing


class Preflight:
    """The checks of one step, and what they have found out.

    Args:
        tx: The optimizer.
        outer: The outer optimizer, if there is one.
        accumulate: Parts of a replica's batch.
        programs: The step before it is planned.
    """

    def __init__(
        self, tx: Transform, outer: OuterOptimizer | None, accumulate: int, programs: Programs
    ) -> None:
        self._tx, self._outer, self._accumulate = tx, outer, accumulate
        self._programs, self._layout, self._via = programs, programs.layout, programs.via
        self._known: dict[Any, Synchronisation] = {}
        self._batches, self._agreed = SameBatch(), False

    def check(self, state: TrainState, batch: PyTree, runs: bool = True) -> Synchronisation:
        """Raise unless a step can take this state and this batch.

        Args:
            state: The state, or its shapes.
            batch: The batch, or its shapes.
            runs: Whether a step follows, and not only its program.

        Returns:
            How replicas with such a state agree.
        """
        here = lambda: self._here(state, batch, runs)  # noqa: E731
        if not (runs and self._layout.mesh.is_multi_process):
            return here()
        if self._agreed:
            self._batches.check(batch)
            return here()
        way = all_or_none(here)
        check_batch_of_processes(batch, self._layout.names)
        self._batches.check(batch)
        self._agreed = True
        return way

    def _here(self, state: Any, batch: PyTree, runs: bool) -> Synchronisation:
        """Check without asking other processes."""
        layout = self._layout
        check_form(state)
        check_batch(batch, layout, self._accumulate, self._programs.places_batches)
        form = form_of(state)
        known = self._known.get(form) if runs else None
        way = known or synchronisation_of(self._tx, self._outer, state.opt_state)
        if known is None:
            check_split(state, layout, self._via)
            self._check_state(way, state)
        if self._via != "pmap":  # pmap copies the state to its devices
            check_devices(state, layout.mesh)
        if known is None and self._programs.is_split and not has_tracers((state, batch)):
            self._check_program(way, state, batch)
        if runs:
            self._known[form] = way
        return way

    def _check_state(self, way: Synchronisation, state: TrainState) -> None:
        """Raise unless the state was built for these optimizers and these replicas."""
        check_leaves(state)
        layout = self._layout.with_params(state.params)
        params = jax.tree.map(_without_sharding, state.params)
        inner = jax.eval_shape(self._tx.init, params)
        way.check(state.params, state.model_state, inner, layout)
        check_structure(params, inner)
        expected = way.init(state.params, state.model_state, inner, layout, shapes=True)
        difference = tree_difference(without_axes(expected), without_axes(state.opt_state))
        if difference is None:
            difference = check_rows(way, state._replace(opt_state=expected), state, layout)
        if difference is not None:
            raise ValueError(
                f"state must be built for {way.made_for}, got one with another opt_state: "
                f"{difference}. Build it with {way.made_by}."
            )
        if dgc_states(inner) and layout.parts > 1:
            check_compression_axis(inner, layout)
            check_mixing(self._tx, params, inner, layout)

    def _check_program(self, way: Synchronisation, state: TrainState, batch: PyTree) -> None:
        """Look into the program, which is lowered once, for what arrays do not tell."""
        found: list[str] = []

        def text() -> str:
            if not found:
                with self._programs.mesh():
                    lowered = self._programs.lower(way, way.lowered(), state, batch)
                found.append(lowered.as_text())
            return found[0]

        check_every_axis(text, state, batch, self._layout)
        if self._via != "jit":
            warn_of_lookups(text, state, batch, self._layout)


def _without_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = aval_of(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
