"""The keyword arguments of the transforms, typed once, and their signatures with the defaults.

A function takes `**options: Unpack[DGCOptions]`, which type checkers and editors read. With
`with_options` its signature lists them one by one, for `help()` and `optax.inject_hyperparams`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, get_type_hints

import optax

from jrc._mesh_axes import AxisName
from jrc._text import brief
from jrc._typing import Array, PyTree, Real, Whole
from jrc.dgc._config import DGCConfig
from jrc.dgc._exchanges import Auto, Exchange
from jrc.dgc._selectors import Selector
from jrc.dgc._wires import Wire


class ScheduleOptions(TypedDict, total=False):
    """When how much is sent, by how many replicas."""

    sparsity: Real | Sequence[Real]
    rampup_begin_step: Whole
    rampup_step: Whole
    num_trainers: Whole | None


class ExchangeOptions(TypedDict, total=False):
    """Which entries are sent, how, and between whom."""

    axis_name: AxisName | None
    min_size: Whole
    selector: Selector | str
    wire: Wire | str
    exchange: Exchange | Auto | str
    param_specs: PyTree


class MomentumOptions(ExchangeOptions, total=False):
    """The keyword-only arguments of `jrc.dgc_momentum`."""

    factor_masking: bool
    clip_scaling: str
    clip_before_rampup: bool
    count_dtype: str


class DGCOptions(ScheduleOptions, MomentumOptions, total=False):
    """The keyword-only arguments of `jrc.scale_by_dgc`."""

    use_nesterov: bool
    local_grad_clip_norm: Real | Array | None
    regularization: Real | Array | optax.GradientTransformation | None


class EF21Options(ScheduleOptions, ExchangeOptions, total=False):
    """The keyword-only arguments of `jrc.scale_by_ef21`."""


F = TypeVar("F", bound=Callable[..., Any])


def with_options(options: type, **defaults: Any) -> Callable[[F], F]:
    """Return a decorator: the signature of a function lists its options and has their defaults.

    Args:
        options: The `TypedDict` of the function's `**options`.
        **defaults: Those that are not `DGCConfig`'s.

    Returns:
        The decorator. The function is called with every option.
    """
    fields = {field.name: field.default for field in dataclasses.fields(DGCConfig)} | defaults
    hints = get_type_hints(options)
    keywords = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=fields[name], annotation=hints[name]
        )
        for name in fields
        if name in hints
    ]

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        named = [x for x in own.parameters.values() if x.kind is not x.VAR_KEYWORD]
        signature = own.replace(parameters=[*named, *keywords])

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            bound.apply_defaults()
            return function(*bound.args, **bound.kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def call_text(maker: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Return the call of a public function as text: the arguments that are not its defaults.

    Args:
        maker: The function.
        given: Its arguments by name.
    """
    shown = [
        f"{name}={brief(given[name])}"
        for name, parameter in inspect.signature(maker).parameters.items()
        if parameter.default is inspect.Parameter.empty
        or brief(given[name]) != brief(parameter.default)
    ]
    return f"jrc.{maker.__name__}({', '.join(shown)})"
