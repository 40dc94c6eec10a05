"""Where growing regions end."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Set
from typing import Any

from jrc._jaxpr import (
    MadeInside,
    Program,
    equation_flops,
    facts_of,
    independent_axes,
    shape_of,
)
from jrc.remat._chunks.region import Region
from jrc.remat._gradient.activity import active_variables


def nowhere(v: Any, axis: int) -> bool:
    """Return that slices lie across devices nowhere."""
    return False


def anywhere(region: Region) -> bool:
    """Return that a region may lie anywhere."""
    return True


@dataclasses.dataclass(eq=False)
class ProgramFacts:
    """What growing regions ask of a program; the same for all limits.

    Attributes:
        program: The program.
        ends: The results that are differentiated; by default all.
        perturbed: The inputs that they are differentiated by; by default all.
    """

    program: Program
    ends: Collection[Any] | None = None
    perturbed: Collection[Any] | None = None

    @property
    def results(self) -> Collection[Any]:
        """The results that are differentiated."""
        return self.program.jaxpr.outvars if self.ends is None else self.ends

    @functools.cached_property
    def active(self) -> set[Any]:
        """The values that a derivative flows through."""
        if self.perturbed is None:
            return self.active_by_all
        return active_variables(self.program, self.perturbed, self.results)

    @functools.cached_property
    def active_by_all(self) -> set[Any]:
        """The same, were all inputs perturbed."""
        return active_variables(self.program, self.program.jaxpr.invars, self.results)

    @functools.cached_property
    def before_products(self) -> set[int]:
        """The equations after which, up to numbers, there is a product or a result of the program.

        Products themselves are among them.
        """
        program, found = self.program, {len(self.program.eqns)}
        for p in reversed(range(len(program.eqns))):
            arrays = (v for v in program.eqns[p].outvars if shape_of(v))
            after = (c for v in arrays for c in program.consumers.get(v, ()))
            if is_product(program.eqns[p]) or not found.isdisjoint(after):
                found.add(p)
        return found

    @functools.cached_property
    def made_inside(self) -> MadeInside:
        return MadeInside(self.program, independent_axes)


def is_product(eqn: Any) -> bool:
    """Return whether an equation multiplies matrices, or is a convolution."""
    return facts_of(eqn).is_contraction and equation_flops(eqn) > 0


@dataclasses.dataclass(eq=False)
class Limits:
    """Where growing regions end, and what is known of growths before.

    Attributes:
        facts: The program, and what is known of it.
        narrow: Bytes of the widest value that may enter or leave.
        apart: Equations that stay outside; what they read and make may be wide.
        lies_across: Of a value and an axis, whether slices along it would lie across devices.
        accepts: Whether a region may be one of those that are found.
        taken: Equations of other regions.
        failed: Values around which there is no region along an axis; no region may make them.
        met: Equations of other regions at which the last growth ended, along any axis.
        conflicts: The equations at which growths ended as they read another slice of a value than
            the region does, or all of it; each with the number of the operand.
        wide_sums: Whether sums over the axis may leave that are wide.
        met_wide_sum: Whether a growth came to such a sum, and they may not.
    """

    facts: ProgramFacts
    narrow: int
    apart: Set[int] = frozenset()
    lies_across: Callable[[Any, int], bool] = nowhere
    accepts: Callable[[Region], bool] = anywhere
    taken: set[int] = dataclasses.field(default_factory=set)
    failed: set[tuple[Any, int]] = dataclasses.field(default_factory=set)
    met: set[int] = dataclasses.field(default_factory=set)
    conflicts: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    wide_sums: bool = False
    met_wide_sum: bool = False
    _without: "dict[Region, Limits]" = dataclasses.field(default_factory=dict)

    def without(self, region: Region) -> "Limits":
        """Return the limits of regions that hold one; what failed around that one fails again.

        Args:
            region: One of those that have their equations.
        """
        if region not in self._without:
            self._without[region] = dataclasses.replace(
                self, taken=set(), failed=set(), met=set(), _without={}
            )
        found = self._without[region]
        found.taken |= self.taken.difference(region.equations)
        return found

    @functools.cached_property
    def with_wide_sums(self) -> "Limits":
        """The same where sums over the axis may leave that are wide."""
        return dataclasses.replace(self, wide_sums=True, failed=set())
