"""The configuration of the compression, one frozen value that checks itself."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrc._errors import listed
from jrc._mesh_axes import AxisName, axes_of_run
from jrc._typing import Array, Real, Whole
from jrc._validate import check_flag, is_real, one_of, scalar, whole_number
from jrc.dgc._clip import CLIP_SCALINGS
from jrc.dgc._exchanges import (
    EXCHANGES,
    Auto,
    EntryExchange,
    Exchange,
    Sharded,
    TensorExchange,
)
from jrc.dgc._momentum import Average, Momentum
from jrc.dgc._own_objects import with_checks
from jrc.dgc._regularize import l2_penalty
from jrc.dgc._schedule import COUNT_DTYPES
from jrc.dgc._selectors import SELECTORS, Blocked, Selector
from jrc.dgc._wires import WIRES, Wire

# An entry takes the bytes of two, its position being one of them.
_LEAST_LAST_SPARSITY = 0.5

_logger = logging.getLogger("jrc")

Number = Real | Array
"""A Python number, or a scalar array such as a hyperparameter that a schedule injects."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DGCConfig:
    """The arguments of `jrc.scale_by_dgc`, which describes them, checked and in one form.

    After construction `sparsity` is a tuple, `regularization` a transform or `None`, `wire` and
    `exchange` are values, and `selector` is a value or `"auto"`.
    """

    momentum: Momentum | Average = Momentum(0.9)
    sparsity: Any = (0.999,)
    rampup_begin_step: Whole = 0
    rampup_step: Whole = 1
    local_grad_clip_norm: Number | None = None
    num_trainers: Whole | None = None
    axis_name: AxisName | None = None
    min_size: Whole = 16384
    factor_masking: bool = True
    regularization: Any = None
    selector: Any = "auto"
    wire: Any = "f32"
    exchange: Any = "auto"
    clip_scaling: str = "sqrt"
    clip_before_rampup: bool = False
    count_dtype: str = "float64"
    param_specs: Any = None

    def __post_init__(self) -> None:
        """Check every field and bring it into its form."""
        if self.axis_name is not None:
            axes_of_run(self.axis_name, "None, the name of one axis")
        for name in ("factor_masking", "clip_before_rampup"):
            check_flag(getattr(self, name), name)
        one_of(self.clip_scaling, "clip_scaling", CLIP_SCALINGS)
        one_of(self.count_dtype, "count_dtype", COUNT_DTYPES)
        exchange = self.exchange
        if not isinstance(exchange, Auto):
            exchange = _named(exchange, "exchange", EXCHANGES, (EntryExchange, TensorExchange))
        checked = {
            "sparsity": checked_sparsity(self.sparsity),
            "rampup_begin_step": _static("rampup_begin_step", self.rampup_begin_step, 0),
            "rampup_step": _static("rampup_step", self.rampup_step, 1),
            "local_grad_clip_norm": _clip_norm(self.local_grad_clip_norm),
            "num_trainers": _trainers(self.num_trainers, self.axis_name),
            "min_size": _static("min_size", self.min_size, 0),
            "regularization": _regularization(self.regularization),
            "selector": _selector(self.selector, exchange),
            "wire": _named(self.wire, "wire", WIRES, (Wire,)),
            "exchange": exchange,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def axis(self) -> str | None:
        """The axis along which replicas differ; of a pair the outer one."""
        return self.axis_name if isinstance(self.axis_name, str | None) else self.axis_name[1]

    @property
    def inner_axis(self) -> str | None:
        """The axis along which gradients are averaged first."""
        return None if isinstance(self.axis_name, str | None) else self.axis_name[0]

    def selector_for(self, exchange: Exchange) -> Selector:
        """Return the selector that was given, or for `"auto"` the one that suits an exchange."""
        if isinstance(self.selector, str):
            return SELECTORS["blocked" if isinstance(exchange, Sharded) else "exact"]
        return self.selector


def checked_sparsity(sparsity: Any) -> tuple[float, ...]:
    """Return the sparsity levels as a tuple; one number is one level."""
    if isinstance(sparsity, np.ndarray | jax.Array) and not isinstance(sparsity, jax.core.Tracer):
        sparsity = sparsity.tolist()
    remedy = "sparsity=(0.999,) sends one entry in a thousand."
    single = is_real(sparsity)
    if not single and (not isinstance(sparsity, Sequence) or isinstance(sparsity, str)):
        raise TypeError(
            f"sparsity must be a number or a sequence of numbers, got {sparsity!r}. {remedy}"
        )
    levels: tuple[Any, ...] = (sparsity,) if single else tuple(sparsity)
    if not levels:
        raise ValueError(f"sparsity must have at least one level, got none. {remedy}")
    for level in levels:
        if not is_real(level) or not 0 <= level < 1:
            raise ValueError(
                f"every sparsity must be a number in [0, 1), got {level!r} in {levels!r}. "
                "It is the share that is kept back: 0.999 sends one entry in a thousand."
            )
    found = tuple(float(level) for level in levels)
    if 0 < found[-1] < _LEAST_LAST_SPARSITY:
        _logger.warning(
            "jrc.scale_by_dgc: sparsity=%s keeps back the share %g and sends %g of the entries, "
            "which are more bytes than an exchange of all. If %g is the density, write "
            "sparsity=(%g,).",
            found, found[-1], 1 - found[-1], found[-1], 1 - found[-1],
        )  # fmt: skip
    return found


_REMEDIES = {
    "rampup_begin_step": "0 compresses from the first step on",
    "rampup_step": "1 begins with the last level",
    "num_trainers": "Leave it out to take the size of the axis",
    "min_size": "0 compresses every floating leaf",
}


def _static(name: str, value: Any, least: int) -> int:
    """Return an integer that is known while tracing."""
    remedy = f"{_REMEDIES[name]}; under optax.inject_hyperparams name {name!r} in static_args."
    return whole_number(value, name, least=least, remedy=remedy)


def checked_momentum(momentum: Number, use_nesterov: bool) -> Momentum:
    """Return the momentum that `jrc.scale_by_dgc` is given."""
    check_flag(use_nesterov, "use_nesterov")
    momentum = scalar(
        momentum,
        "momentum",
        rule="in [0, 1)",
        holds=lambda m: 0 <= m < 1,
        remedy="Pass 0.9.",
    )
    # A float64 one would make the state float64.
    array = isinstance(momentum, jax.Array)
    return Momentum(momentum.astype(jnp.float32) if array else float(momentum), use_nesterov)


def _clip_norm(norm: Number | None) -> Number | None:
    if norm is None:
        return None
    remedy = "Pass None for no clipping."
    return scalar(norm, "local_grad_clip_norm", rule="> 0", holds=lambda c: c > 0, remedy=remedy)


def _trainers(num_trainers: Whole | None, axis_name: AxisName | None) -> int | None:
    if num_trainers is None:
        return None
    number = _static("num_trainers", num_trainers, 1)
    if axis_name is None and number != 1:
        raise ValueError(
            "num_trainers must be 1 or left out where axis_name is None, which means one "
            f"replica, got num_trainers={number}. Pass axis_name='data', the mesh axis with the "
            f"{number} replicas, and run the step under jax.shard_map over that mesh."
        )
    return number


def _regularization(value: Any) -> optax.GradientTransformation | None:
    """Return the transform of local gradients; a number is the factor of an L2 penalty."""
    if value is None or isinstance(value, optax.GradientTransformation):
        return value
    if is_real(value) or isinstance(value, jax.Array):
        remedy = "Pass 1e-4, or None."
        holds = lambda factor: factor >= 0  # noqa: E731
        return l2_penalty(scalar(value, "regularization", rule=">= 0", holds=holds, remedy=remedy))
    raise TypeError(
        "regularization must be a number (the L2 factor), an optax transform or None, got "
        f"{value!r}. Pass 1e-4, or jrc.l1_penalty(1e-4)."
    )


def _selector(value: Any, exchange: Exchange | Auto) -> Selector | str:
    if isinstance(value, str) and value == "auto":
        return value
    found = _named(value, "selector", SELECTORS, (Selector,), ("auto",))
    if isinstance(exchange, Sharded) and not isinstance(found, Blocked):
        raise ValueError(
            "selector must be 'blocked' for exchange='sharded', which needs as many "
            f"entries of each block on every replica, got {value!r}. Leave selector out, or pass "
            "exchange='allgather'."
        )
    return found


def _named(
    value: Any,
    name: str,
    known: dict[str, Any],
    protocols: tuple[type, ...],
    more: tuple[str, ...] = (),
) -> Any:
    """Return the value of that name, or `value` if it is one of its own."""
    if isinstance(value, str) and value in known:
        return known[value]
    if not isinstance(value, str | type) and isinstance(value, protocols):
        return value if type(value) in map(type, known.values()) else with_checks(value, protocols)
    kinds = " or ".join(f"jrc.dgc.{protocol.__name__}" for protocol in protocols)
    raise ValueError(
        f"{name} must be one of {listed([*known, *more])} or an object with the methods of "
        f"{kinds}, got {value!r}. Leave {name} out for the default."
    )
