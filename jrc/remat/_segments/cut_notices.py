"""What a cut saves, by name, and what a user should know about it."""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from jrc._errors import close_to, listed
from jrc._jaxpr import INPUT, Program
from jrc._tree import is_typed_key
from jrc.remat._segments.boundaries import counts_as_work, user_marks
from jrc.remat._segments.cut import Section, SectionedProgram
from jrc.remat._segments.keep_patterns import Pattern, operator_names
from jrc.remat._segments.request import Request


class Notice(NamedTuple):
    """A text, and the level at which it is logged."""

    level: int
    text: str


def crossing_values(program: Program, section: Section) -> dict[Any, str]:
    """Return the values, no boundaries, that a section makes and others read, with their names."""
    boundary = {var for name in section.boundary for var in program.marked(name)}
    crossing = {program.unmarked(var) for var in program.crossing(section.positions)}
    names = saved_values(program, section)
    return {var: name for var, name in names.items() if var in crossing - boundary}


def saved_values(program: Program, section: Section) -> dict[Any, str]:
    """Return the values that a section saves or that others read, each once, with their names.

    A value with several marks has the name of the boundary, if one of them is that.
    """
    names = {var: name for name in reversed(section.boundary) for var in program.marked(name)}
    crossing = (program.unmarked(var) for var in program.crossing(section.positions))
    made = dict.fromkeys((*section.saved, *crossing, *names))
    return {
        var: names.get(var) or program.names.get(var) or program.name(program.producer[var])
        for var in sorted(made, key=program.producer.__getitem__)
        if program.producer[var] != INPUT
    }


def notices(program: Program, sections: SectionedProgram, request: Request) -> list[Notice]:
    """Return what a user may not expect of a cut, each with the way out."""
    return [
        *_crossing(program, sections),
        *requests_without_effect(program, sections, request),
    ]


def _crossing(program: Program, sections: SectionedProgram) -> Iterator[Notice]:
    """One notice about all values that cross: Paddle's warning about better checkpoints."""
    names = [
        name
        for section in sections.sections
        if section.recompute
        for var, name in crossing_values(program, section).items()
        # A key is a few bytes: no boundary is worth moving for it.
        if not is_typed_key(var.aval)
    ]
    if names:
        one = len(names) == 1
        yield Notice(
            logging.INFO,
            f"{len(names)} {'value crosses' if one else 'values cross'} from one segment into "
            f"another and {'is' if one else 'are'} saved besides the boundaries: "
            f"{', '.join(names)}. Better boundaries would reduce this: place one behind the last "
            "reader of such a value, or compute the value where it is read.",
        )


def requests_without_effect(
    program: Program, sections: SectionedProgram, request: Request
) -> list[Notice]:
    """Return the requests that do nothing, each with the way out."""
    found = []
    for name in sections.unknown:
        marks = user_marks(program)
        found.append(
            Notice(
                logging.WARNING,
                f"boundary {name!r} cuts nothing: no mark has this name{close_to(name, marks)}; "
                f"the marks are {listed(marks)}. Correct the name, or remove it.",
            )
        )
    found += [
        Notice(
            logging.INFO,
            f"boundary {name!r} cuts nothing: the result does not depend on it, or it names an "
            "input. Remove it, or mark a value that the result depends on.",
        )
        for name in sections.unused
        if name not in sections.unknown
    ]
    found += [
        Notice(
            logging.INFO,
            f"between {first!r} and {second!r} there is too little to recompute. Move them apart.",
        )
        for first, second in sections.too_short
    ]
    return found + _unmatched(program, sections, request)


def _unmatched(program: Program, sections: SectionedProgram, request: Request) -> list[Notice]:
    """The patterns that match nothing in any segment."""
    parts = [
        [p for p in section.positions if counts_as_work(program, p)]
        for section in sections.sections
        if section.recompute
    ]
    return [
        Notice(
            logging.WARNING,
            f"keep_patterns[{i}] matches nothing: {_why(program, pattern)}. Correct it, or "
            "remove it.",
        )
        for i, pattern in enumerate(request.patterns)
        if parts and pattern.num and not any(pattern.matches(program, part) for part in parts)
    ]


def _why(program: Program, pattern: Pattern) -> str:
    known = {name for p in range(len(program.eqns)) for name in operator_names(program, p)}
    missing = [op for op in pattern.all if op not in known]
    if missing:
        return f"the function has no operator {missing[0]!r}{close_to(missing[0], known)}"
    return f"no segment has the operators {', '.join(pattern.all)} in a row"
