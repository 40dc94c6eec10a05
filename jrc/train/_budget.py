"""A train step that fits a memory budget, planned at its first call, when shapes are known."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from jrc._errors import name_of
from jrc._specs import shards_of, spec_of
from jrc._targets import chip_of_device, is_compile_only
from jrc._tree import aval_of
from jrc._typing import PyTree
from jrc.remat import Plan, device_of, host_link, plan_within
from jrc.train._loss import result_of
from jrc.train._runners import Programs
from jrc.train._state import TrainState
from jrc.train._synchronisation import Synchronisation


class Budgeted:
    """The compiled steps with a plan for each combination of argument shapes and dtypes.

    Attributes:
        plan: The plan of the last call; `None` before the first call.
    """

    def __init__(
        self,
        build: Callable[[Callable[..., Any]], Programs],
        loss_fn: Callable[..., Any],
        budget: int | str | float,
        respect_checkpoints: bool,
        offload: bool | float = False,
        compilations: int | None = None,
        minimize: Literal["time", "flops"] = "time",
    ) -> None:
        self.plan: Plan | None = None
        self._build, self._loss_fn, self._budget = build, loss_fn, budget
        self._respects, self._offload = respect_checkpoints, offload
        self._compilations, self._minimize = compilations, minimize
        self._known: dict[Any, tuple[Plan, Programs]] = {}

    def __call__(self, way: Synchronisation, state: TrainState, batch: PyTree) -> Programs:
        """Return the steps whose plan is for these arguments."""
        leaves, treedef = jax.tree.flatten((state, batch))
        avals = map(aval_of, leaves)
        key = treedef, tuple((x.shape, str(x.dtype), x.weak_type, spec_of(x)) for x in avals)
        if key not in self._known:
            device = device_of(leaves)
            plan = plan_within(
                self._loss_fn,
                lambda loss_fn: self._build(loss_fn).lower(way, way.lowered(), state, batch),
                self._budget,
                functools.partial(_has_aux, self._loss_fn, state.model_state),
                platform=device.platform,
                respect_checkpoints=self._respects,
                link=host_link(self._offload, None, leaves),
                parts=max(
                    (shards_of(leaf, 0) for leaf in jax.tree.leaves(state.params)), default=1
                ),
                target=_target(device),
                compilations=self._compilations,
                minimize=self._minimize,
            )
            self._known[key] = plan, self._build(plan.apply(self._loss_fn))
        self.plan, programs = self._known[key]
        return programs


def _target(device: Any) -> str:
    """The name of an accelerator that is not there; empty for a device that is."""
    if not is_compile_only(device):
        return ""
    chip = chip_of_device(device)
    return chip.name if chip else device.device_kind


def _has_aux(loss_fn: Callable[..., Any], model_state: PyTree, out: Any) -> bool:
    """Whether the loss function returned `(loss, ...)`, after a check of what it returned."""
    result_of(out, model_state, name_of(loss_fn))
    return isinstance(out, tuple)
