"""Values of which only a slice is read, computed as that slice alone.

The loss of a language model drops the logits of the last token: `logits[:, :-1]`. Of 8,192 tokens
8,191 are left, and the axis is another one in front of the slice and behind it. Where the logits
are computed from the states of 8,191 tokens at once, one axis goes through all of the loss.

>>> import jax, jax.numpy as jnp
>>> loss = lambda x, w: jnp.sum(jnp.tanh(x @ w)[:-1])
>>> program = Program(jax.make_jaxpr(loss)(jnp.ones((4, 3)), jnp.ones((3, 50))))
>>> [(eqn.primitive.name, eqn.outvars[0].aval.shape) for eqn in program.eqns]
[('dot_general', (4, 50)), ('tanh', (4, 50)), ('slice', (3, 50)), ('reduce_sum', ())]
>>> [(eqn.primitive.name, eqn.outvars[0].aval.shape) for eqn in early_slices(program).eqns]
[('slice', (3, 3)), ('dot_general', (3, 50)), ('tanh', (3, 50)), ('reduce_sum', ())]
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from jax.extend.core import JaxprEqn

from jrc._jaxpr.atoms import is_variable, shape_of
from jrc._jaxpr.axis_rules import IndependentAxis
from jrc._jaxpr.axis_slices import AxisSlice, lies_across, slice_equation
from jrc._jaxpr.custom_derivatives import are_linear_rules
from jrc._jaxpr.equations import has_effects
from jrc._jaxpr.independent_axes import independent_axes
from jrc._jaxpr.primitives import facts_of, primitive_name
from jrc._jaxpr.program import Program
from jrc._jaxpr.slice_program import on_slice


def early_slices(program: Program) -> Program:
    """Return the program in which values are computed as slices, where all readers want the same.

    A slice moves from a value to what it is made of, along independent axes, up to a product or a
    value that is read otherwise too. Inputs and results are as before.

    Args:
        program: The program, without `jit` calls.

    Returns:
        The program itself, where no slice can move.
    """
    wanted = _Wanted(program)
    if not any(_slice_of(eqn) and p in wanted.absorbed for p, eqn in enumerate(program.eqns)):
        return program
    return Program(_Rewriting(program, wanted).program())


class _Wanted:
    """What is read of each value.

    Attributes:
        axes: By position, the equations that run on a slice, each with the axis and the slice of
            its results.
        absorbed: The `slice` equations whose operand is computed as that slice.
    """

    def __init__(self, program: Program) -> None:
        self.axes: dict[int, tuple[IndependentAxis, AxisSlice]] = {}
        self.absorbed: set[int] = set()
        self._read: dict[Any, AxisSlice | None] = {}
        self._want(program.jaxpr.outvars, None)
        live = program.live()
        for p in reversed(range(len(program.eqns))):
            if live[p]:
                self._follow(p, program.eqns[p])
        for p, eqn in enumerate(program.eqns):
            wanted, (x, *_) = _slice_of(eqn), (*eqn.invars, None)
            made = program.producer.get(x) if is_variable(x) else None
            if wanted and live[p] and made in self.axes and self._read[x] == wanted:
                self.absorbed.add(p)

    def of(self, v: Any) -> AxisSlice | None:
        """The slice of a value that all want; `None` if one of them wants it whole."""
        return self._read.get(v)

    def _want(self, atoms: Iterable[Any], part: AxisSlice | None) -> None:
        for x in filter(is_variable, atoms):
            self._read[x] = part if self._read.get(x, part) == part else None

    def _follow(self, p: int, eqn: JaxprEqn) -> None:
        read = {self._read[v] for v in eqn.outvars if v in self._read}
        part = _slice_of(eqn)
        if part and read == {None}:
            self._want(eqn.invars, part)
            return
        found = read.pop() if len(read) == 1 else None
        axis = _axis(eqn, found) if found else None
        if axis is None or found is None:
            self._want(eqn.invars, None)
            return
        self.axes[p] = axis, found
        is_product = facts_of(eqn).is_contraction
        for x, at in zip(eqn.invars, axis.operands, strict=True):
            is_sliced = at is not None and not is_product
            self._want([x], found.along(at) if is_sliced else None)


def _slice_of(eqn: JaxprEqn) -> AxisSlice | None:
    """The slice that an equation takes of one axis, if that is all that it does."""
    if primitive_name(eqn) != "slice" or not is_variable(eqn.invars[0]):
        return None
    starts, limits, strides = (
        eqn.params[key] for key in ("start_indices", "limit_indices", "strides")
    )
    shape = shape_of(eqn.invars[0])
    cut = [i for i, n in enumerate(shape) if limits[i] - starts[i] < n]
    if len(cut) != 1 or any(n != 1 for n in strides or ()):
        return None
    return AxisSlice(cut[0], starts[cut[0]], limits[cut[0]])


def _axis(eqn: JaxprEqn, part: AxisSlice) -> IndependentAxis | None:
    """The axis of an equation whose results are wanted in slices."""
    if has_effects(eqn) or facts_of(eqn).is_collective or _are_split(eqn, part.axis):
        return None
    if not are_linear_rules([eqn]):
        return None  # a gradient may come from a row that nothing reads
    for axis in independent_axes(eqn):
        made = [(v, at) for v, at in zip(eqn.outvars, axis.results, strict=True) if at is not None]
        has_places = made and all(
            at == part.axis and shape_of(v)[at] == axis.parts for v, at in made
        )
        read = [(x, at) for x, at in zip(eqn.invars, axis.operands, strict=True) if at is not None]
        is_whole = all(shape_of(x)[at] == axis.parts for x, at in read)
        if has_places and is_whole and not axis.is_summed and not axis.counts:
            return axis
    return None


def _are_split(eqn: JaxprEqn, axis: int) -> bool:
    return any(lies_across(v, axis) for v in eqn.outvars)


class _Rewriting:
    """The program on slices."""

    def __init__(self, program: Program, wanted: _Wanted) -> None:
        self._program, self._wanted = program, wanted
        self._eqns: list[JaxprEqn] = []
        self._parts: dict[tuple[Any, AxisSlice], Any] = {}

    def program(self) -> Any:
        """The rewritten program."""
        program = self._program
        for p, is_live in enumerate(program.live()):
            eqn = program.eqns[p]
            if not is_live:
                continue
            if p in self._wanted.absorbed:
                part = _slice_of(eqn)
                assert part is not None
                self._parts[eqn.outvars[0], _ALL] = self._parts[eqn.invars[0], part]
            elif p in self._wanted.axes:
                self._on_slice(eqn, *self._wanted.axes[p])
            else:
                self._eqns.append(eqn.replace(invars=self._whole(eqn.invars)))
        return program.jaxpr.replace(eqns=self._eqns, outvars=self._whole(program.jaxpr.outvars))

    def _whole(self, atoms: Sequence[Any]) -> list[Any]:
        return [self._parts.get((x, _ALL), x) if is_variable(x) else x for x in atoms]

    def _on_slice(self, eqn: JaxprEqn, axis: IndependentAxis, part: AxisSlice) -> None:
        share = Fraction(part.limit - part.start, axis.parts)
        invars = [
            x if at is None else self._part(x, part.along(at), eqn)
            for x, at in zip(self._whole(eqn.invars), axis.operands, strict=True)
        ]
        eqns, outvars = on_slice(eqn, axis, share, invars)
        self._eqns += eqns
        for v, new in zip(eqn.outvars, outvars, strict=True):
            self._parts[v, part] = new

    def _part(self, x: Any, part: AxisSlice, reader: JaxprEqn) -> Any:
        """A slice of a value, made where it is read first."""
        if (x, part) not in self._parts:
            eqn = slice_equation(x, part)
            self._eqns.append(eqn.replace(source_info=reader.source_info))
            (self._parts[x, part],) = eqn.outvars
        return self._parts[x, part]


_ALL = AxisSlice(-1, 0, 0)
"""All of a value, in the place of a slice of it."""
