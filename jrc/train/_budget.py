"""A train step that fits a memory budget, planned at its first call, when shapes are known."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from jrc._errors import name_of
from jrc._specs import spec_of
from jrc._targets import chip_of_device, is_compile_only
from jrc._typing import PyTree
from jrc._validate import check_flag, one_of
from jrc.remat import (
    Plan,
    check_offload,
    checked_budget,
    checked_compilations,
    copy_bandwidth_of,
    device_of,
    plan_within,
)
from jrc.train._loss import result_of
from jrc.train._runners import Programs
from jrc.train._state import TrainState
from jrc.train._synchronisation import Synchronisation


@dataclasses.dataclass(frozen=True)
class Planning:
    """What is asked of a plan for a whole step: arguments of `jrc.make_train_step`."""

    budget: Any  # bytes, a text or a fraction; None without a plan
    respect_checkpoints: bool
    offload: bool | float
    compilations: int | None
    minimize: Literal["time", "flops"]

    def check(self, plan: Any, via: str) -> None:
        """Raise if an argument has a wrong type or value, or two do not go together."""
        if plan is not None and not isinstance(plan, Plan):
            raise TypeError(
                f"plan must be a jrc.Plan, got {type(plan).__name__}. Read a stored one with "
                "jrc.Plan.from_json(text)."
            )
        if plan is not None and self.budget is not None:
            raise ValueError(
                f"plan and memory_budget must not both be given, got a plan and {self.budget!r}. "
                "Leave one of them out."
            )
        check_flag(self.respect_checkpoints, "respect_checkpoints")
        check_offload(self.offload)
        checked_compilations(self.compilations)
        one_of(self.minimize, "minimize", ("time", "flops"))
        if self.budget is None:
            return self._check_alone()
        checked_budget(self.budget, "memory_budget")
        if via == "pmap":
            raise ValueError(
                "memory_budget must be used with a single program, got via='pmap', which makes "
                "several. Use via='shard_map', or pass plan=jrc.plan(loss_fn, ...)."
            )

    def _check_alone(self) -> None:
        """Raise if something is asked of a plan that no budget asks for."""
        given = {
            "respect_checkpoints=True": self.respect_checkpoints,
            "offload=True": self.offload is not False,
            "compilations=6": self.compilations is not None,
            "minimize='flops'": self.minimize != "time",
        }
        for option in (option for option, is_given in given.items() if is_given):
            raise ValueError(
                f"{option.partition('=')[0]} must go with memory_budget, got none. Pass "
                f"memory_budget='16GiB', or a plan that was made with {option}."
            )


class Budgeted:
    """The compiled steps with a plan for each combination of argument shapes and dtypes.

    Attributes:
        plan: The plan of the last call; `None` before the first call.
    """

    def __init__(
        self,
        build: Callable[[Callable[..., Any]], Programs],
        loss_fn: Callable[..., Any],
        planning: Planning,
    ) -> None:
        self.plan: Plan | None = None
        self._build, self._loss_fn, self._planning = build, loss_fn, planning
        self._unplanned = build(loss_fn)
        self._known: dict[Any, tuple[Plan, Programs]] = {}

    def __call__(self, way: Synchronisation, state: TrainState, batch: PyTree) -> Programs:
        """Return the steps whose plan is for these arguments."""
        state, batch = self._unplanned.shapes(state, batch)
        leaves, treedef = jax.tree.flatten((state, batch))
        key = treedef, tuple((x.shape, str(x.dtype), x.weak_type, spec_of(x)) for x in leaves)
        if key not in self._known:
            device, asked = device_of(leaves), self._planning
            plan = plan_within(
                self._loss_fn,
                lambda loss_fn: self._build(loss_fn).lower(way, way.lowered(), state, batch),
                asked.budget,
                functools.partial(_has_aux, self._loss_fn, state.model_state),
                platform=device.platform,
                respect_checkpoints=asked.respect_checkpoints,
                copy_bandwidth=copy_bandwidth_of(asked.offload, None, leaves),
                placed=self._unplanned.placed_inside(state, batch),
                target=_target(device),
                compilations=asked.compilations,
                minimize=asked.minimize,
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
