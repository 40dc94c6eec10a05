"""Values that are made slice by slice where a slice is read: masks, counts, random bits.

>>> import jax, jax.numpy as jnp
>>> from jrc._jaxpr.independent_axes import independent_axes
>>> mask = lambda x: jnp.where(jnp.tri(64, dtype=bool), x, 0)
>>> from jrc._jaxpr.inline import inline_all
>>> program = Program(inline_all(jax.make_jaxpr(mask)(jnp.ones((64, 64)))))
>>> (triangle,) = [eqn.outvars[0] for eqn in program.eqns if eqn.primitive.name == "ge"]
>>> MadeInside(program, independent_axes).bytes(triangle, 0)
0
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jrc._jaxpr.atoms import is_variable
from jrc._jaxpr.axis_rules import IndependentAxis
from jrc._jaxpr.cost import nbytes
from jrc._jaxpr.equations import has_effects, inner_programs
from jrc._jaxpr.primitives import Fusion, facts_of, primitive_name
from jrc._jaxpr.program import INPUT, Program
from jrc._jaxpr.varying_casts import is_cast
from jrc._tree import is_floating

Place = tuple[Var, int]
"""A value that is read in slices, and the axis of the slices."""

AxesOf = Callable[[JaxprEqn], Sequence[IndependentAxis]]
"""From an equation to its independent axes."""


_DRAWN = ("random_bits", "threefry2x32")
"""Random bits: drawn where a slice of them is read, they need no memory besides."""


def remembered(program: Program, independent_axes: AxesOf) -> AxesOf:
    """Return the axes of a program's equations, each of which is asked for once.

    Args:
        program: The program.
        independent_axes: The axes of an equation by itself, see `IndependentAxis`.
    """
    known = program.known_axes.setdefault(independent_axes, {})

    def axes(eqn: JaxprEqn) -> Sequence[IndependentAxis]:
        if eqn not in known:
            known[eqn] = tuple(independent_axes(eqn))
        return known[eqn]

    return axes


class MadeInside:
    """What of a program is made slice by slice where a slice of it is read.

    Args:
        program: The program.
        independent_axes: The axes of an equation, see `IndependentAxis`.
    """

    def __init__(self, program: Program, independent_axes: AxesOf) -> None:
        self._program = program
        self._independent_axes = remembered(program, independent_axes)
        self._bytes: dict[Place, int] = {}
        self._cut: dict[Place, frozenset[Var]] = {}

    def axis(self, v: Var, at: int) -> IndependentAxis | None:
        """Return along which axis a value is made in slices; `None` if it is made whole and cut.

        It is made in slices if what is cut for it then has no more bytes than itself.
        """
        is_made = self._bytes_of_operands(v, at) <= nbytes(v.aval)
        return self._axis_of_result(v, at) if is_made else None

    def axis_of_any(self, v: Var, at: int) -> IndependentAxis | None:
        """Return along which axis a value may be made in slices, whatever it costs."""
        p = self._program.producer[v]
        if p == INPUT or has_effects(eqn := self._program.eqns[p]) or facts_of(eqn).is_collective:
            return None
        return self._along(eqn, v, at)

    def cut(self, v: Var, at: int) -> frozenset[Var]:
        """Return what is cut for a value: what it is made of in slices, or itself."""
        if (v, at) not in self._cut:
            axis = self.axis(v, at)
            found = [{v}] if axis is None else [self.cut(*each) for each in self._read(v, axis)]
            self._cut[v, at] = frozenset().union(*found)
        return self._cut[v, at]

    def bytes(self, v: Var, at: int) -> int:
        """Return the bytes of what is cut: for a value that is made in slices, or itself."""
        if (v, at) not in self._bytes:
            self._bytes[v, at] = min(nbytes(v.aval), self._bytes_of_operands(v, at))
        return self._bytes[v, at]

    def _bytes_of_operands(self, v: Var, at: int) -> int:
        axis = self._axis_of_result(v, at)
        if axis is None:
            return nbytes(v.aval)
        return sum(self.bytes(*each) for each in self._read(v, axis))

    def _read(self, v: Var, axis: IndependentAxis) -> set[Place]:
        """What of operands is read for a slice of a value."""
        operands = self._program.eqns[self._program.producer[v]].invars
        pairs = zip(operands, axis.operands, strict=True)
        return {(x, at) for x, at in pairs if at is not None and is_variable(x)}

    def _is_read(self, x: Any, at: int) -> bool:
        return is_variable(x) and self.bytes(x, at) > 0

    def _axis_of_result(self, v: Var, at: int) -> IndependentAxis | None:
        p = self._program.producer[v]
        if p == INPUT or not _is_cheap(eqn := self._program.eqns[p]):
            return None
        return self._along(eqn, v, at)

    def _along(self, eqn: JaxprEqn, v: Var, at: int) -> IndependentAxis | None:
        if is_cast(eqn) and is_floating(v.aval) and self._is_read(eqn.invars[0], at):
            return None  # its gradient would be summed over devices in each slice
        return next((x for x in self._independent_axes(eqn) if set(x.results) == {at}), None)


def _is_cheap(eqn: JaxprEqn) -> bool:
    facts = facts_of(eqn)
    if inner_programs(eqn) or has_effects(eqn) or facts.is_collective:
        return False
    is_drawn = primitive_name(eqn) in _DRAWN
    return facts.fusion is Fusion.INSIDE or facts.moves_data or is_drawn
