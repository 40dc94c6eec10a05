"""Products of values that are padded with zeros, made of what is padded.

The gradient of a loss that drops the logits of the last token, `logits[:, :-1]`, begins with
cotangents of 8,191 tokens that are padded to 8,192. What is linear in them computes the same of the
8,191, and is padded behind. One axis then goes through the loss and the products of its gradient.
This is the transpose of `early_slices`.

>>> import jax, jax.numpy as jnp
>>> pad = lambda g: jax.lax.pad(g, 0.0, [(0, 1, 0), (0, 0, 0)])
>>> gradient = lambda w, x, g: (pad(g) @ w, x @ pad(g))
>>> args = jnp.ones((50, 2)), jnp.ones((2, 4)), jnp.ones((3, 50))
>>> program = Program(jax.make_jaxpr(gradient)(*args))
>>> [(eqn.primitive.name, eqn.outvars[0].aval.shape) for eqn in late_pads(program).eqns]
[('dot_general', (3, 2)), ('pad', (4, 2)), ('slice', (2, 3)), ('dot_general', (2, 50))]
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from jrc._jaxpr.atoms import is_variable, shape_of
from jrc._jaxpr.axis_rules import IndependentAxis
from jrc._jaxpr.axis_slices import AxisSlice, lies_across, pad_equation, slice_equation
from jrc._jaxpr.cost import nbytes
from jrc._jaxpr.equations import has_effects
from jrc._jaxpr.independent_axes import independent_axes
from jrc._jaxpr.primitives import facts_of, is_linear_in, primitive_name
from jrc._jaxpr.program import Program
from jrc._jaxpr.slice_program import on_slice
from jrc._jaxpr.sums_onto_zeros import made_as_zeros


def late_pads(program: Program) -> Program:
    """Return the program in which products of values that are padded with zeros are padded instead.

    What is linear in such a value, up to the first product, is made of the value before it is
    padded. Inputs and results are as before.

    Args:
        program: The program, without `jit` calls.

    Returns:
        The program itself, where no product is made so.
    """
    if not any(_padded(program, eqn) for eqn in program.eqns):
        return program
    rewriting = _Rewriting(program)
    new = rewriting.program()
    return Program(new) if rewriting.products else program


def _padded(program: Program, eqn: JaxprEqn) -> AxisSlice | None:
    """Which part of its result an equation pads with zeros along one axis, if it does that."""
    if primitive_name(eqn) != "pad" or made_as_zeros(program, eqn.invars[1]) is None:
        return None
    config = eqn.params["padding_config"]
    (axis, *more) = [i for i, each in enumerate(config) if tuple(each) != (0, 0, 0)] or [-1, -1]
    if more:
        return None
    low, high, between = config[axis]
    if low < 0 or high < 0 or between or not shape_of(eqn.invars[0])[axis]:
        return None
    return AxisSlice(axis, low, shape_of(eqn.outvars[0])[axis] - high)


class _Rewriting:
    """The program with pads behind what is linear.

    Attributes:
        products: How many products run on values before they are padded.
    """

    def __init__(self, program: Program) -> None:
        self.products = 0
        self._program = program
        self._eqns: list[JaxprEqn] = []
        self._parts: dict[Any, tuple[Any, AxisSlice]] = {}
        """Of a value that is padded, what is padded, and where that lies."""
        self._made: set[Any] = set()
        """The padded values that an equation makes already."""
        self._slices: dict[tuple[Any, AxisSlice], Any] = {}

    def program(self) -> Any:
        """The rewritten program."""
        for p, is_live in enumerate(self._program.live()):
            if is_live:
                self._rewrite(self._program.eqns[p])
        self._make(self._program.jaxpr.outvars)
        return self._program.jaxpr.replace(eqns=self._eqns)

    def _rewrite(self, eqn: JaxprEqn) -> None:
        part = _padded(self._program, eqn)
        if part:
            self._make(eqn.invars)
            self._parts[eqn.outvars[0]] = eqn.invars[0], part
            return
        found = self._axis(eqn)
        if found:
            self._on_part(eqn, *found)
        else:
            self._make(eqn.invars)
            self._eqns.append(eqn)

    def _make(self, atoms: Sequence[Any]) -> None:
        """Pad the values that are read."""
        for v in dict.fromkeys(filter(is_variable, atoms)):
            if v in self._parts and v not in self._made:
                self._pad(v, *self._parts[v])
                self._made.add(v)

    def _pad(self, v: Any, x: Any, part: AxisSlice) -> None:
        """Make a value of what is padded, at the line that made it before."""
        source = self._program.eqns[self._program.producer[v]].source_info
        self._eqns.append(pad_equation(x, v, part).replace(source_info=source))

    def _axis(self, eqn: JaxprEqn) -> tuple[IndependentAxis, AxisSlice] | None:
        """The axis of an equation that is linear in padded values, along which all are padded."""
        reads = [is_variable(x) and x in self._parts for x in eqn.invars]
        if not any(reads) or has_effects(eqn) or facts_of(eqn).is_collective:
            return None
        if not is_linear_in(eqn, reads) or not _makes_zeros_of_zeros(eqn):
            return None
        padded = sum(nbytes(x.aval) for x, flag in zip(eqn.invars, reads, strict=True) if flag)
        if facts_of(eqn).is_contraction and sum(nbytes(v.aval) for v in eqn.outvars) > padded:
            return None  # the pad of what is narrow would become one of what is wide
        parts = [
            self._parts[x][1] if flag else None for x, flag in zip(eqn.invars, reads, strict=True)
        ]
        part = next(filter(None, parts))
        for axis in independent_axes(eqn):
            is_padded = all(
                each is None or at is not None and each == part.along(at)
                for each, at in zip(parts, axis.operands, strict=True)
            )
            if is_padded and not axis.counts and _has_places(eqn, axis):
                return axis, part
        return None

    def _on_part(self, eqn: JaxprEqn, axis: IndependentAxis, part: AxisSlice) -> None:
        share = Fraction(part.limit - part.start, axis.parts)
        invars = [
            x if at is None else self._part_of(x, part.along(at), eqn)
            for x, at in zip(eqn.invars, axis.operands, strict=True)
        ]
        eqns, outvars = on_slice(eqn, axis, share, invars)
        is_product = facts_of(eqn).is_contraction
        self.products += is_product
        if axis.is_summed:
            self._eqns += [*eqns[:-1], eqns[-1].replace(outvars=eqn.outvars)]
            return
        self._eqns += eqns
        for v, new, at in zip(eqn.outvars, outvars, axis.results, strict=True):
            assert at is not None
            if is_product:
                self._pad(v, new, part.along(at))
            else:
                self._parts[v] = new, part.along(at)

    def _part_of(self, x: Any, part: AxisSlice, reader: JaxprEqn) -> Any:
        if x in self._parts:
            return self._parts[x][0]
        if (x, part) not in self._slices:
            eqn = slice_equation(x, part)
            self._eqns.append(eqn.replace(source_info=reader.source_info))
            (self._slices[x, part],) = eqn.outvars
        return self._slices[x, part]


def _makes_zeros_of_zeros(eqn: JaxprEqn) -> bool:
    """Whether what is linear makes zeros of zeros: not a quotient by zero, nor an index outside."""
    if primitive_name(eqn) == "div":
        return isinstance(eqn.invars[1], Literal) and eqn.invars[1].val != 0
    return primitive_name(eqn) != "gather"


def _has_places(eqn: JaxprEqn, axis: IndependentAxis) -> bool:
    """Whether slices of operands and results along an axis are slices of their own axes."""
    values = [*zip(eqn.invars, axis.operands, strict=True)]
    if not axis.is_summed:
        if any(at is None for at in axis.results):
            return False
        values += zip(eqn.outvars, axis.results, strict=True)
    cut = [(v, at) for v, at in values if at is not None]
    return all(shape_of(v)[at] == axis.parts and not lies_across(v, at) for v, at in cut)
