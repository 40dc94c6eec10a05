"""What a user asks for by name: parameters by their tree path, intermediates by their mark."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jrc._errors import close_to, listed, name_of
from jrc._jaxpr import Program


class Request(NamedTuple):
    """The request as the program knows it.

    Attributes:
        wanted: The value behind each pair that is asked for, by the pair's name, in the order of
            the pairs.
        stopped: Values at which the flow stops.
    """

    wanted: Mapping[str, Any]
    stopped: frozenset[Any]


class Names(NamedTuple):
    """Whose names there are: the request speaks for `who` about `fn`.

    Attributes:
        who: The public name that was called.
        fn: The loss function.
        program: Its program.
        params: The program's input for each parameter, by name; `None` for a leaf that is no
            JAX array.
    """

    who: str
    fn: Callable[..., Any]
    program: Program
    params: Mapping[str, Any]


def checked_names(who: str, argument: str, names: Any, ordered: bool) -> tuple[str, ...] | None:
    """The names as a tuple, each once; `None` if none were given."""
    if names is None:
        return None
    if ordered and isinstance(names, set | frozenset):
        raise TypeError(
            f"{who}: {argument} gives the order of the pairs, and a set has none; got {names!r}. "
            "Write a list."
        )
    if isinstance(names, str) or not isinstance(names, list | tuple | set | frozenset):
        raise TypeError(
            f"{who}: {argument} is a list of names; got {type(names).__name__} {names!r}. "
            f"Write {argument}=['layer_0/w']."
        )
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"{who}: {argument} holds names, strings; got {type(name).__name__}. A parameter "
                "is named by its path ('layer_0/w'), an intermediate by its jrc.mark."
            )
    return tuple(dict.fromkeys(names))


def resolve(
    names: Names, parameter_list: Iterable[str] | None, no_grad_set: Iterable[str]
) -> Request:
    """Look every name up; what is not to have a gradient wins over what is asked for."""
    wanted = dict(names.params)
    if parameter_list is not None:
        wanted = {k: v for name in parameter_list for k, v in _look_up(names, name).items()}
    excluded = {k: v for name in no_grad_set for k, v in _look_up(names, name).items()}
    return Request(
        {k: v for k, v in wanted.items() if v is not None and k not in excluded},
        frozenset(v for v in excluded.values() if v is not None),
    )


def mark_pairs(program: Program, name: str) -> dict[str, Any]:
    """The marked values, by pair name: the mark's, with a number each if it marks several."""
    pairs = {}
    for mark in program.called(name):
        values = program.marked(mark)
        pairs |= {mark if len(values) == 1 else f"{mark}/{i}": v for i, v in enumerate(values)}
    return pairs


def _look_up(names: Names, name: str) -> dict[str, Any]:
    pairs = mark_pairs(names.program, name)
    if name in names.params:
        if pairs:
            raise ValueError(
                f"{names.who}: {name!r} names a parameter and a mark of `{name_of(names.fn)}`. "
                "Give the mark another name."
            )
        return {name: names.params[name]}
    if not pairs:
        raise ValueError(_unknown(names, name))
    return pairs


def _unknown(names: Names, name: str) -> str:
    program, fn = names.program, name_of(names.fn)
    bare = name.partition("#")[0]
    if bare in program.hidden_marks:
        return (
            f"{names.who}: mark {name!r} of `{fn}` stands inside {program.hidden_marks[bare]}, "
            "where a gradient of the outer function cannot be asked for or stopped. Mark what "
            "goes in or comes out of that construct instead."
        )
    known = [*names.params, *program.marks]
    return (
        f"{names.who}: no parameter and no mark is named {name!r}{close_to(name, known)}; the "
        f"parameters are {listed(names.params)}, and `{fn}` marks "
        f"{listed(program.marks, 'nothing')}."
    )
