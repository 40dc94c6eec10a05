"""Names in arguments: parameters by their tree path, intermediates by their mark."""

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

from jrc._errors import close_to, listed, name_of
from jrc._jaxpr import Program


class Request(NamedTuple):
    """The names of a request, resolved to values of the program.

    Attributes:
        wanted: The value of each requested pair by the pair's name, in the order of the pairs.
        stopped: Values at which the gradient stops.
    """

    wanted: Mapping[str, Any]
    stopped: frozenset[Any]


Name = str | tuple[str, Any]
"""A name, or a pair that begins with one, as `append_backward` returns."""


class Names(NamedTuple):
    """The names that a loss function has.

    Attributes:
        fn: The loss function.
        program: Its program.
        params: The program's input for each parameter, by name; `None` for a leaf that is not a
            JAX array.
    """

    fn: Callable[..., Any]
    program: Program
    params: Mapping[str, Any]


def checked_names(argument: str, names: Any, ordered: bool) -> tuple[str, ...] | None:
    """Return the names as a tuple, each once; `None` if none were given.

    A pair of a name and a gradient, as `append_backward` returns it, counts as its name.
    """
    if names is None:
        return None
    if ordered and isinstance(names, set | frozenset):
        raise TypeError(
            f"{argument} must be a list of names, which gives the order of the pairs, got "
            f"the set {names!r}. Write a list."
        )
    if not isinstance(names, list | tuple | Set):
        raise TypeError(
            f"{argument} must be a list of names, got {type(names).__name__} {names!r}. "
            f"Write {argument}=['layer_0/w']."
        )
    bare = [entry[0] if _is_pair(entry) else entry for entry in names]
    for name in bare:
        if not isinstance(name, str):
            raise TypeError(
                f"{argument} must be a list of names, got one with {type(name).__name__}. "
                "Name a parameter by its path ('layer_0/w'), an intermediate by its jrc.mark."
            )
    return tuple(dict.fromkeys(bare))


def _is_pair(entry: Any) -> bool:
    """Whether this is `(name, gradient)`."""
    return isinstance(entry, tuple) and len(entry) == 2 and not isinstance(entry[1], str)


def resolve(
    names: Names, parameter_list: Iterable[str] | None, no_grad_set: Iterable[str]
) -> Request:
    """Resolve all names; `no_grad_set` takes precedence over `parameter_list`."""
    wanted = dict(names.params)
    if parameter_list is not None:
        wanted = {k: v for name in parameter_list for k, v in _look_up(names, name).items()}
    excluded = {k: v for name in no_grad_set for k, v in _look_up(names, name).items()}
    return Request(
        {k: v for k, v in wanted.items() if v is not None and k not in excluded},
        frozenset(v for v in excluded.values() if v is not None),
    )


def mark_pairs(program: Program, name: str) -> dict[str, Any]:
    """Return the marked values by pair name: the mark's, with a number each if there are many."""
    return dict(pair for mark in program.matching_marks(name) for pair in _pairs_of(program, mark))


def _pairs_of(program: Program, mark: str) -> list[tuple[str, Any]]:
    values = program.marked(mark)
    return [(mark if len(values) == 1 else f"{mark}/{i}", v) for i, v in enumerate(values)]


def _look_up(names: Names, name: str) -> dict[str, Any]:
    """Return the values that a name refers to, by the names of their pairs."""
    program = names.program
    made = [pair for mark in program.marks for pair in _pairs_of(program, mark)]
    pairs = mark_pairs(program, name) or {k: v for k, v in made if k == name}
    if name in names.params and not pairs:
        return {name: names.params[name]}
    # A bare name refers to marks inside a loop or another construct as well.
    if not pairs or name in program.hidden_marks:
        raise ValueError(_unknown(names, name))
    for pair in {name: None} | pairs:
        _check_single(names, pair, [k for k, _ in made].count(pair))
    return pairs


def _check_single(names: Names, pair: str, marks: int) -> None:
    """Raise if a pair's name refers to several values."""
    fn = name_of(names.fn)
    if pair in names.params:
        raise ValueError(
            f"a name must refer to one value, got {pair!r}, which is a parameter and "
            f"a mark of `{fn}`. Give the mark another name."
        )
    if marks > 1:
        raise ValueError(
            f"a name must refer to one value, got {pair!r}, which is two marks of "
            f"`{fn}`: an array of a marked tree is named by the mark and its number. Give one of "
            "the marks another name."
        )


def _unknown(names: Names, name: str) -> str:
    program, fn = names.program, name_of(names.fn)
    marks = (name.partition("#")[0], name.rpartition("/")[0])
    if bare := next((mark for mark in marks if mark in program.hidden_marks), None):
        return (
            f"a mark must stand outside of loops and other constructs, got {name!r} "
            f"of `{fn}`, which is inside {program.hidden_marks[bare]}. Mark an input or a result "
            "of that construct, under another name."
        )
    known = [*names.params, *program.marks]
    return (
        f"a name must be that of a parameter or a mark, got {name!r}"
        f"{close_to(name, known)}. The parameters are {listed(names.params)}, and `{fn}` marks "
        f"{listed(program.marks, 'nothing')}."
    )
