"""The regions that a gradient recomputes, found in its live equations."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jrc._jaxpr import (
    UNKNOWN,
    LiveEquation,
    is_differentiated_region,
    is_variable,
    nbytes,
    place,
    primitive_name,
)
from jrc.remat._region.rerun_scope import is_planned, is_rerun


@dataclasses.dataclass(frozen=True, eq=False)
class RerunRegion:
    """A region that the backward pass recomputes.

    Attributes:
        place: Its source line, in words.
        bytes: Bytes of the recomputed values that its derivative reads.
        at: Its position among the gradient's equations; `None` inside a loop.
        eqn: Its equation.
        rerun: The live equations inside that are recomputed.
    """

    place: str
    bytes: int
    at: int | None
    eqn: Any
    rerun: Sequence[LiveEquation]


def rerun_regions(program: Sequence[LiveEquation], name: str) -> list[RerunRegion]:
    """Return the regions that are recomputed and are inside of no other one."""
    return list(_regions(program, name))


def place_text(eqn: Any, name: str) -> str:
    """Return where an equation is: its source line, or the function if it has no line."""
    return f"in `{name}`" if place(eqn) == UNKNOWN else f"at {place(eqn)}"


def _regions(
    program: Sequence[LiveEquation], name: str, outermost: bool = True
) -> Iterator[RerunRegion]:
    for at, node in enumerate(program):
        if is_planned(node.eqn):
            continue
        if _is_rerun_region(node.eqn):
            yield _region(node, name, at if outermost else None)
        else:
            for part in node.inside:
                yield from _regions(part, name, outermost=False)


def _is_rerun_region(eqn: Any) -> bool:
    """Return whether this equation is a region in the form that the backward pass recomputes."""
    wrapped = primitive_name(eqn) == "RematTraced" and is_rerun(eqn)
    return wrapped or is_differentiated_region(eqn)


def _region(node: LiveEquation, name: str, at: int | None) -> RerunRegion:
    inside = [each for part in node.inside for each in part]
    if primitive_name(node.eqn) == "RematTraced":
        rerun, needed = inside, list(node.eqn.outvars)
    else:
        rerun = [each for each in inside if is_rerun(each.eqn)]
        read = {v for each in inside if not is_rerun(each.eqn) for v in each.eqn.invars
                if is_variable(v)}  # fmt: skip
        needed = [v for each in rerun for v in each.eqn.outvars if v in read]
    size = sum(nbytes(v.aval) for v in dict.fromkeys(needed))
    return RerunRegion(place_text(node.eqn, name), size, at, node.eqn, rerun)
