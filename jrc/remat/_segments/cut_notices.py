"""What a segment keeps, by name, and what a user should hear of it."""

from typing import Any

from jrc._jaxpr import INPUT, Program
from jrc.remat._segments.cut import Section, SectionedProgram


def segment_residuals(program: Program, cut: Section) -> dict[Any, str]:
    """The values that a segment leaves or keeps, a marked value once, with their names.

    A value with several marks has the name of the boundary, if one of them is that.
    """
    names_in = {var: name for name in reversed(cut.boundary) for var in program.marked(name)}
    crossing = (program.unmarked(var) for var in program.crossing(cut.positions))
    made = dict.fromkeys((*cut.held, *crossing, *names_in))
    return {
        var: names_in.get(var) or program.names.get(var) or program.name(program.producer[var])
        for var in sorted(made, key=program.producer.__getitem__)
        if program.producer[var] != INPUT
    }


def notices(program: Program, cuts: SectionedProgram) -> list[str]:
    """What is not as the user may think, each with the way out."""
    found = []
    for cut in cuts.cuts:
        names = segment_residuals(program, cut).values()
        crossing = [name for name in names if name not in cut.boundary]
        if cut.recompute and crossing:
            found.append(
                f"{', '.join(crossing)} made before {', '.join(cut.boundary)} and used after it: "
                "kept too. Move a boundary there, or make the value where it is used."
            )
    return found + cuts_without_effect(cuts)


def cuts_without_effect(cuts: SectionedProgram) -> list[str]:
    """What was asked for and does nothing, each with the way out."""
    found = [
        f"boundary {name!r} cuts nothing: the result does not depend on it, it names an input, "
        "or nothing carries the name. Remove it, or mark a value on the way to the result."
        for name in cuts.unused
    ]
    found += [
        f"between {first!r} and {second!r} there is too little to re-run. Move them apart."
        for first, second in cuts.too_short
    ]
    return found
