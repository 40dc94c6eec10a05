"""What a user may ask of the compression, checked once."""

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrc._errors import listed
from jrc._typing import Array
from jrc._validate import check_flag
from jrc.dgc._collectives import AxisName, is_pair
from jrc.dgc._momentum import Decay
from jrc.dgc._regularize import l2_penalty
from jrc.dgc._selectors import DEFAULT_SELECTOR, SELECTORS, Blocked, Selector
from jrc.dgc._wires import WIRES, Wire

EXCHANGES = ("allgather", "sharded", "dense", "auto")

_REAL = (int, float, np.integer, np.floating)

_WHO = "jrc.scale_by_dgc"

_HINTS = {
    "rampup_begin_step": "0 compresses from the first step on",
    "rampup_step": "1 begins with the last level",
    "num_trainers": "leave it out to take the axis's size",
    "min_size": "0 compresses every floating leaf",
}

Number = float | Array
"""A Python number, or a scalar array such as a hyperparameter that a schedule injects."""


class Options(NamedTuple):
    """Checked arguments of `scale_by_dgc`; `regularization` is always a transform."""

    decay: Decay
    sparsity: tuple[float, ...]
    rampup_begin_step: int
    rampup_step: int
    local_grad_clip_norm: Number | None
    num_trainers: int | None
    axis_name: str | None
    inner_axis: str | None
    min_size: int
    factor_masking: bool
    regularization: optax.GradientTransformation | None
    selector: Selector | None
    wire: Wire
    exchange: str
    clip_scaling: str = "sqrt"
    clip_before_rampup: bool = False
    count_dtype: str = "float64"

    def selector_for(self, form: str) -> Selector:
        """The selector that was asked for, or what suits a form."""
        if self.selector is not None:
            return self.selector
        return SELECTORS["blocked" if form == "sharded" else DEFAULT_SELECTOR]


def checked_momentum(momentum: Number) -> Number:
    """The momentum, in [0, 1) as far as its value is known."""
    momentum = _checked_number("momentum", momentum, lambda m: 0 <= m < 1, "lie in [0, 1)", "0.9")
    # A float64 one would make the state float64.
    return momentum.astype(jnp.float32) if isinstance(momentum, jax.Array) else float(momentum)


def checked_clip_norm(norm: Number | None) -> Number | None:
    """The bound of a gradient's norm, positive as far as its value is known."""
    if norm is None:
        return None
    hint = "None, for no clipping"
    return _checked_number("local_grad_clip_norm", norm, lambda c: c > 0, "be positive", hint)


def checked_sparsity(sparsity: float | Sequence[float]) -> tuple[float, ...]:
    """The levels as a tuple; one number is one level."""
    if isinstance(sparsity, np.ndarray | jax.Array) and not isinstance(sparsity, jax.core.Tracer):
        sparsity = sparsity.tolist()
    if not isinstance(sparsity, (*_REAL, Sequence)) or isinstance(sparsity, str):
        raise TypeError(
            "jrc.scale_by_dgc: sparsity must be a number or a sequence of numbers, got "
            f"{sparsity!r}; sparsity=(0.999,) sends one entry in a thousand"
        )
    levels = (sparsity,) if isinstance(sparsity, _REAL) else tuple(sparsity)
    if not levels:
        raise ValueError(
            "jrc.scale_by_dgc: sparsity must hold at least one level, got none; "
            "sparsity=(0.999,) sends one entry in a thousand"
        )
    for level in levels:
        if not isinstance(level, _REAL) or not 0 <= level < 1:
            raise ValueError(
                f"jrc.scale_by_dgc: every sparsity must lie in [0, 1), got {level!r} in "
                f"{levels!r}; it is the share kept back, so 0.999 sends one entry in a thousand"
            )
    return tuple(float(level) for level in levels)


def checked_int(name: str, value: int, least: int) -> int:
    """An integer known while tracing, not below its least value."""
    wrong = (
        f"jrc.scale_by_dgc: {name} must be a Python int, known while tracing, got {value!r}; "
        f"under optax.inject_hyperparams name {name!r} in static_args"
    )
    if isinstance(value, bool):
        raise TypeError(wrong)
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(wrong) from error
    if number < least:
        raise ValueError(
            f"jrc.scale_by_dgc: {name} must be at least {least}, got {number}; {_HINTS[name]}"
        )
    return number


def checked_flag(name: str, value: bool) -> bool:
    """A switch; NumPy's counts too."""
    check_flag(value := bool(value) if isinstance(value, np.bool_) else value, name, _WHO)
    return value


def check_rate(rate: Any, who: str) -> None:
    """Refuse a learning rate that is neither a number nor a schedule, which optax finds late."""
    if callable(rate) or isinstance(rate, jax.core.Tracer):
        return
    kinds = (*_REAL, jax.Array, np.ndarray)
    if isinstance(rate, bool) or not isinstance(rate, kinds) or jnp.ndim(rate):
        raise TypeError(
            f"{who}: learning_rate must be a number or an optax schedule, got {rate!r}; pass 0.1"
        )
    if not math.isfinite(rate):
        raise ValueError(f"{who}: learning_rate must be finite, got {rate!r}; pass 0.1")


def checked_selector(selector: Selector | str, exchange: str) -> Selector | None:
    """A selector, by value or name; `None` for `"auto"`."""
    if selector == "auto":
        return None
    found = _checked_value("selector", selector, SELECTORS, Selector, ("auto",))
    if exchange == "sharded" and not isinstance(found, Blocked):
        raise ValueError(
            "jrc.scale_by_dgc: exchange='sharded' needs as many entries of each block on every "
            f"replica, which only selector='blocked' gives; got selector={selector!r}. Leave "
            "selector out, or take exchange='allgather'"
        )
    return found


def checked_wire(wire: Wire | str) -> Wire:
    """A wire format, by value or name."""
    return _checked_value("wire", wire, WIRES, Wire)


def checked_choice(name: str, value: str, allowed: Collection[str]) -> str:
    """A name out of a list."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"jrc.scale_by_dgc: {name} must be one of {listed(allowed)}, got {value!r}"
        )
    return value


def _checked_value(
    name: str, value: Any, known: dict[str, Any], kind: Any, more: tuple[str, ...] = ()
) -> Any:
    """A frozen value of some kind, or the one of that name."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, str) or value not in known:
        names = listed([*known, *more])
        raise ValueError(
            f"jrc.scale_by_dgc: {name} must be one of {names} or such a value of jrc.dgc, got "
            f"{value!r}"
        )
    return known[value]


def checked_axes(axis_name: AxisName | None) -> tuple[str | None, str | None]:
    """The axis inside of which gradients are averaged, and that of the replicas."""
    if axis_name is None or isinstance(axis_name, str):
        return None, axis_name
    if is_pair(axis_name):
        inner, outer = axis_name
        return inner, outer
    raise ValueError(
        "jrc.scale_by_dgc: axis_name must be the name of one axis, a pair (inner, outer), or "
        f"None, got {axis_name!r}; name the axis over which the replicas differ"
    )


def checked_trainers(num_trainers: int | None, axis_name: str | None) -> int | None:
    """The number of replicas, if said; one without an axis."""
    if num_trainers is None:
        return None
    number = checked_int("num_trainers", num_trainers, 1)
    if axis_name is None and number != 1:
        raise ValueError(
            f"jrc.scale_by_dgc: num_trainers={number} needs an axis over which the replicas "
            "differ, and axis_name=None is one replica; pass axis_name"
        )
    return number


def checked_regularization(
    regularization: Number | optax.GradientTransformation | None,
) -> optax.GradientTransformation | None:
    """The transform of local gradients, if any; a number is the factor of an L2 penalty."""
    if regularization is None or isinstance(regularization, optax.GradientTransformation):
        return regularization
    if isinstance(regularization, (*_REAL, jax.Array)):
        hint = "1e-4, or None"
        return l2_penalty(
            _checked_number("regularization", regularization, lambda f: f >= 0, "be >= 0", hint)
        )
    raise TypeError(
        "jrc.scale_by_dgc: regularization must be a number (the L2 factor), an optax transform or "
        f"None, got {regularization!r}; pass 1e-4, or jrc.l1_penalty(1e-4)"
    )


def _checked_number(name, value: Number, holds, rule: str, hint: str) -> Number:
    """A number that holds to its rule; the value of a tracer is not known yet."""
    if isinstance(value, jax.core.Tracer):
        return value
    known = isinstance(value, (*_REAL, jax.Array)) and not isinstance(value, bool)
    if not known or jnp.ndim(value):
        raise TypeError(f"jrc.scale_by_dgc: {name} must be a number, got {value!r}; pass {hint}")
    if not (math.isfinite(value) and holds(value)):
        raise ValueError(f"jrc.scale_by_dgc: {name} must {rule}, got {value!r}; pass {hint}")
    return value
