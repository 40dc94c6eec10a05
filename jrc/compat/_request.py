"""What a user asks for by name: parameters by their tree path, intermediates by their mark."""

from collections.abc import Callable, Iterable, Mapping, Set
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
    if not isinstance(names, list | tuple | Set):
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
    return dict(pair for mark in program.matching_marks(name) for pair in _pairs_of(program, mark))


def _pairs_of(program: Program, mark: str) -> list[tuple[str, Any]]:
    values = program.marked(mark)
    return [(mark if len(values) == 1 else f"{mark}/{i}", v) for i, v in enumerate(values)]


def _look_up(names: Names, name: str) -> dict[str, Any]:
    """The values that a name means, by the names of their pairs."""
    program = names.program
    made = [pair for mark in program.marks for pair in _pairs_of(program, mark)]
    pairs = mark_pairs(program, name) or {k: v for k, v in made if k == name}
    if name in names.params and not pairs:
        return {name: names.params[name]}
    # Marks inside a construct are among those that the bare name means.
    if not pairs or name in program.hidden_marks:
        raise ValueError(_unknown(names, name))
    for pair in {name: None} | pairs:
        _check_single(names, pair, [k for k, _ in made].count(pair))
    return pairs


def _check_single(names: Names, pair: str, marks: int) -> None:
    """A pair is of one thing: otherwise a gradient would go to another of the same name."""
    fn = name_of(names.fn)
    if pair in names.params:
        raise ValueError(
            f"{names.who}: {pair!r} names a parameter and a mark of `{fn}`. Give the mark another "
            "name."
        )
    if marks > 1:
        raise ValueError(
            f"{names.who}: {pair!r} names two marks of `{fn}`: an array of a marked tree is called "
            "after the mark, with its number. Give one of the marks another name."
        )


def _unknown(names: Names, name: str) -> str:
    program, fn = names.program, name_of(names.fn)
    marks = (name.partition("#")[0], name.rpartition("/")[0])
    if bare := next((mark for mark in marks if mark in program.hidden_marks), None):
        return (
            f"{names.who}: mark {name!r} of `{fn}` stands inside {program.hidden_marks[bare]}, "
            "where a gradient of the outer function cannot be asked for or stopped. Mark what "
            "goes in or comes out of that construct, under a name of its own."
        )
    known = [*names.params, *program.marks]
    return (
        f"{names.who}: no parameter and no mark is named {name!r}{close_to(name, known)}; the "
        f"parameters are {listed(names.params)}, and `{fn}` marks "
        f"{listed(program.marks, 'nothing')}."
    )
