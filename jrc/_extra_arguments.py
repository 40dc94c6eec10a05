"""Which extra arguments an optax transform takes, by the signatures of its update functions.

>>> tx = optax.chain(optax.clip(1.0), optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)))
>>> taken(tx, {"value": 1.0, "grad_fn": None})
{'grad_fn': None}
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import optax

from jrc._typing import Transform


def takes_extra_arguments(tx: Transform) -> bool:
    """Whether extra arguments reach a transform; optax drops them before others."""
    # `MultiSteps.gradient_transformation()` says that it takes none, and takes them.
    owner = getattr(tx.update, "__self__", None)
    extended = optax.GradientTransformationExtraArgs | optax.MultiSteps
    return isinstance(tx, extended) or isinstance(owner, optax.MultiSteps)


def extended(tx: Transform) -> Any:
    """Return a transform that may be given extra arguments, whether it uses them or not."""
    # An `optax.MultiSteps` takes extra arguments, though it is no transform of optax's class.
    given: Any = tx
    return given if takes_extra_arguments(tx) else optax.with_extra_args_support(given)


def taken(tx: Transform, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some extra arguments that reach no update function that refuses them."""
    closed = [each.names for each in signatures_of(tx) if each.is_reached and not each.is_open]
    return {name: x for name, x in extra.items() if all(name in names for names in closed)}


class Signature(NamedTuple):
    """The signature of an update function in a transform.

    Attributes:
        names: Extra arguments that it names.
        needed: Those of them without a default.
        is_open: Whether it takes others too, and hands them on.
        is_reached: Whether extra arguments reach it.
    """

    names: frozenset[str]
    needed: tuple[str, ...]
    is_open: bool
    is_reached: bool


def signatures_of(tx: Transform) -> Iterator[Signature]:
    """Return the signatures of all update functions in a transform, its own first."""
    yield from _reached(extended(tx).update, True)


def _reached(update: Callable[..., Any], is_reached: bool) -> Iterator[Signature]:
    """Return the signatures of an update function and of those that it calls.

    Transforms of optax are closures: what a wrapper calls is in its closure, or an attribute of its
    object.
    """
    try:
        arguments = list(inspect.signature(update).parameters.values())
    except (TypeError, ValueError):
        return
    # The first three are gradients, state and parameters.
    named = [x for x in arguments[3:] if x.kind is x.POSITIONAL_OR_KEYWORD]
    named += [x for x in arguments if x.kind is x.KEYWORD_ONLY]
    needed = tuple(x.name for x in named if x.default is x.empty)
    is_open = any(x.kind is x.VAR_KEYWORD for x in arguments)
    yield Signature(frozenset(x.name for x in named), needed, is_open, is_reached)
    function = inspect.unwrap(getattr(update, "__func__", update))
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    owner = getattr(update, "__self__", None)
    held = [*cells, *(vars(owner).values() if hasattr(owner, "__dict__") else ())]
    for inner, is_extended in _updates_in(held):
        yield from _reached(inner, is_reached and is_open and is_extended)


def _updates_in(values: Any) -> Iterator[tuple[Callable[..., Any], bool]]:
    """Return the update functions of transforms, and whether each gets extra arguments at all."""
    for value in values:
        if isinstance(value, optax.GradientTransformation):
            yield value.update, isinstance(value, optax.GradientTransformationExtraArgs)
        elif isinstance(value, Mapping):
            yield from _updates_in(value.values())
        elif isinstance(value, tuple | list):
            # `optax.chain` has functions, of transforms that it has extended.
            yield from ((x, True) for x in value if inspect.isfunction(x))
            yield from _updates_in(value)
