"""How a region that runs in chunks grows around a wide value, along one of its axes."""

import collections
import math
from collections.abc import Collection, Iterator
from typing import Any

from jrc._jaxpr import (
    INPUT,
    Dependent,
    IndependentAxis,
    Slices,
    counted,
    facts_of,
    has_effects,
    independent_axes,
    is_cast,
    is_linear_in,
    is_variable,
    nbytes,
    shape_of,
    sliced,
    with_sums_onto_zeros,
)
from jrc._tree import is_floating
from jrc.remat._chunks.growth_limits import Limits
from jrc.remat._chunks.region import Region
from jrc.remat._gradient.activity import differentiated_outside


class NoRegion(Exception):
    """A wide value enters or leaves, and its equation cannot join."""


class Growth:
    """A region around a value: equations that run on slices of it, and all that must join them.

    Args:
        limits: Where it ends.
        v: The value.
        axis: The axis of the slices in it.
        start: A region that it holds.

    Raises:
        NoRegion: If there is no such region.
    """

    def __init__(self, limits: Limits, v: Any, axis: int, start: Region | None = None) -> None:
        self.limits, self.program, self.narrow = limits, limits.facts.program, limits.narrow
        self.wide, self.live = v, self.program.live()
        self.axes: dict[Any, int] = dict(start.slices.axes) if start else {}
        self.axes[v] = axis
        self.inside: set[int] = set(start.equations) if start else set()
        self.whole: set[Any] = set()
        self.read_whole: set[Any] = set()
        self.makers: list[int] = []  # of wide inputs
        self.readers: list[int] = []  # of wide results
        try:
            self._include(self.program.producer[v])
            self._grow()
        except NoRegion:
            limits.failed |= self._alike()
            raise
        before = dict(self.axes), set(self.inside)
        if self._grow_to_sum():
            self._join_sums()
        else:
            self.axes, self.inside = before

    def region(self) -> Region:
        """Return the region.

        Raises:
            NoRegion: If slices of it depend on each other after all.
        """
        inputs = {v: axis for v, axis in self.axes.items() if not self._is_made(v)}
        try:
            slices = sliced(self.program, inputs, independent_axes, sorted(self.inside))
        except Dependent as error:
            raise NoRegion from error
        results = tuple(self._leaving())
        is_cut = all(v in slices.made for v in results) and not any(map(self._is_made, slices.read))
        if slices.after or slices.parts < 2 or not is_cut:
            raise NoRegion
        if not slices.given and not counted(slices):
            raise NoRegion  # all slices are the same
        sizes = self._width(), self._edge(slices)
        if 2 * sum(nbytes(v.aval) for v in results if v in slices.sums) > max(
            sizes[0], self.narrow
        ):
            raise NoRegion  # what is summed is nearly all that there is
        return Region(slices, tuple(sorted(self.inside)), inputs, results, self.wide, *sizes)

    def _grow(self) -> None:
        """Let all equations join that make wide inputs, read wide results, or stand between."""
        while self.makers or self.readers or self._find_between():
            p = (self.makers or self.readers).pop()
            if p not in self.inside:
                self._include(p)

    def _alike(self) -> set[tuple[Any, int]]:
        """The value, and those around which the same equations would have to join."""
        found, wanted = {self.wide}, [self.wide]
        while wanted:
            x = wanted.pop()
            for p in (self.program.producer[x], *self.program.consumers.get(x, ())):
                if p in self.inside:
                    eqn = self.program.eqns[p]
                    beside = filter(self.axes.__contains__, {*self.program.reads(p), *eqn.outvars})
                    more = [
                        v for v in beside if v not in found and self._is_wide_input(v, self.axes[v])
                    ]
                    found.update(more)
                    wanted += more
        return {(v, self.axes[v]) for v in found}

    def _must_join(self, p: int) -> bool:
        """Whether an equation must join that reads a wide value of the region.

        Results of the program, and equations that stay apart, may read it whole.
        """
        return p < len(self.program.eqns) and p not in self.limits.apart

    def _is_free(self, p: int) -> bool:
        """Whether this is an equation that may join, and no other region has it."""
        return p != INPUT and self._must_join(p) and p not in self.limits.taken

    def _is_wide_input(self, v: Any, axis: int) -> bool:
        # A cast is the array itself, and stays outside.
        producer = self.program.producer[self.program.source(v)]
        if producer == INPUT or producer in self.limits.apart:
            return False
        # What is read whole is there in any case.
        cut = self.limits.facts.made_inside.cut(v, axis).difference(self.whole)
        return sum(nbytes(x.aval) for x in cut) > self.narrow

    def _find_between(self) -> bool:
        """Whether equations outside read what the region makes, and make what it reads."""
        late: set[Any] = set()
        for p in range(min(self.inside), max(self.inside) + 1):
            reads = self.program.reads(p)
            if p in self.inside:
                self.makers += [self.program.producer[v] for v in reads if v in late]
            elif self.live[p] and any(v in late or self._is_made(v) for v in reads):
                late.update(self.program.eqns[p].outvars)
        return bool(self.makers)

    def _leaving(self) -> list[Any]:
        """The values that the region makes and others read."""
        program = self.program
        return [
            v
            for p in sorted(self.inside)
            for v in program.eqns[p].outvars
            if any(c not in self.inside for c in program.consumers.get(v, ()))
        ]

    def _is_made(self, v: Any) -> bool:
        return self.program.producer[v] in self.inside

    def _include(self, p: int) -> None:
        """Let an equation join, along the axis that its operands and results have inside."""
        if not self._is_free(p):
            if p in self.limits.taken:
                self.limits.met.add(p)
            raise NoRegion
        eqn = self.program.eqns[p]
        # The derivative of a cast is a sum over devices, which would run once a chunk.
        casts = is_cast(eqn) and is_floating(eqn.outvars[0].aval)
        if casts or has_effects(eqn) or facts_of(eqn).is_collective:
            raise NoRegion
        rules = with_sums_onto_zeros(self.program, independent_axes)(eqn)
        fitting = [each for each in rules if self._fits(eqn, each)]
        if not fitting:
            for each in rules:
                self.limits.conflicts |= self._conflicts(p, each)
            raise NoRegion
        axis = fitting[0]
        self.inside.add(p)
        operands = list(zip(eqn.invars, axis.operands, strict=True))
        for x, at in operands:
            if at is None and is_variable(x):
                self.whole.update(self._moved_from(x))
                self.read_whole.add(x)
        for i, (x, at) in enumerate(operands):
            if at is not None and is_variable(x) and x not in self.axes:
                if x in self.read_whole:
                    self.limits.conflicts.add((p, i))
                self.axes[x] = at
                if not self._is_made(x) and self._is_wide_input(x, at):
                    self.makers.append(self.program.producer[x])
        for v, at in zip(eqn.outvars, axis.results, strict=True):
            if at is not None and not axis.is_summed:
                self.axes[v] = at
                if (v, at) in self.limits.failed or self.limits.lies_across(v, at):
                    raise NoRegion
            if nbytes(v.aval) > self.narrow:
                if axis.is_summed:  # it has all its bytes whatever reads it
                    self.limits.met_wide_sum = True
                    if self.limits.wide_sums:
                        continue
                self.readers += filter(self._must_join, self.program.consumers.get(v, ()))

    def _moved_from(self, x: Any) -> Iterator[Any]:
        """A value, and those that it is only another arrangement of."""
        while is_variable(x):
            yield x
            p = self.program.producer[x]
            is_moved = p != INPUT and facts_of(self.program.eqns[p]).moves_data
            x = (*self.program.eqns[p].invars, None)[0] if is_moved else None

    def _fits(self, eqn: Any, axis: IndependentAxis) -> bool:
        operands = zip(eqn.invars, axis.operands, strict=True)
        results = zip(eqn.outvars, axis.results, strict=True)
        known = [(x, at) for x, at in (*operands, *results) if is_variable(x) and x in self.axes]
        return bool(known) and all(self.axes[x] == at for x, at in known)

    def _conflicts(self, p: int, axis: IndependentAxis) -> set[tuple[int, int]]:
        """The operands without which an equation would fit, if they may be values of their own."""
        eqn = self.program.eqns[p]
        results = zip(eqn.outvars, axis.results, strict=True)
        if any(v in self.axes and self.axes[v] != at for v, at in results):
            return set()
        known = {i: x for i, x in enumerate(eqn.invars) if is_variable(x) and x in self.axes}
        wrong = {i: x for i, x in known.items() if self.axes[x] != axis.operands[i]}
        is_read_else = len(wrong) < len(known) or any(v in self.axes for v in eqn.outvars)
        if not is_read_else or any(map(self._is_made, wrong.values())):
            return set()
        return {(p, i) for i in wrong}

    def _grow_to_sum(self) -> bool:
        """Whether all that follows, up to sums over the axis, joined; without further products."""
        try:
            while True:
                leaving = [v for v in self._leaving() if shape_of(v)]
                if not leaving:
                    return not any(map(shape_of, self._leaving()))
                readers = [c for v in leaving for c in self.program.consumers[v]]
                outside = [c for c in readers if c not in self.inside]
                if not self.limits.facts.before_products.isdisjoint(outside):
                    return False
                for c in outside:
                    if c not in self.inside:
                        self._include(c)
                self._grow()
        except NoRegion:
            return False

    def _join_sums(self) -> None:
        """Take in what adds up several sums, so that one is left: a loss of several terms.

        What depends on the region by another way stays outside, and so does what reads that.
        """
        sums, late, found = set(self._leaving()), set(), set(self.inside)
        for p in range(min(self.inside), len(self.program.eqns)):
            eqn, reads = self.program.eqns[p], set(self.program.reads(p))
            if p in found or sums.isdisjoint(reads) and late.isdisjoint(reads):
                continue
            is_free = self.live[p] and self._is_free(p) and late.isdisjoint(reads)
            if is_free and is_linear_in(eqn, sums) and not is_cast(eqn):
                sums.update(eqn.outvars)
                self.inside.add(p)
            else:
                late.update(eqn.outvars)
        if self.inside > found and self._differentiated(self.inside) >= self._differentiated(found):
            self.inside = found

    def _differentiated(self, inside: Collection[int]) -> int:
        """How many values of some equations are differentiated outside: each has a gradient."""
        facts = self.limits.facts
        found = differentiated_outside(self.program, inside, facts.results, facts.active_by_all)
        return sum(v in found for p in inside for v in self.program.eqns[p].outvars)

    def _width(self) -> int:
        """Bytes that are live at once inside, the most; of results only those of a forward pass."""
        live = most = 0
        last: dict[Any, int] = {}
        for p in sorted(self.inside):
            made = filter(self._is_made, self.program.reads(p))
            last |= dict.fromkeys(filter(self.axes.__contains__, made), p)
        freed = collections.Counter[int]()
        for v, p in last.items():
            freed[p] += nbytes(v.aval)
        for p in sorted(self.inside):
            live += sum(nbytes(v.aval) for v in self.program.eqns[p].outvars if v in self.axes)
            most = max(most, live)
            live -= freed[p]
        return most

    def _edge(self, slices: Slices) -> int:
        """Bytes of what is joined, of what is read in each chunk, and of what gradients need.

        Values that are cut have a cotangent beside them; those of whole ones are summed over
        chunks. What lies in slices already is read where it is.
        """
        active = self.limits.facts.active
        given = sum((at > 0) * nbytes(v.aval) for v, at in slices.given if v not in active)
        given += sum(2 * nbytes(v.aval) for v, _ in slices.given if v in active)
        left = sum(nbytes(v.aval) * (1 + (v in active)) for v in self._leaving())
        whole = sum(nbytes(v.aval) for v in slices.whole if v not in active)
        return given + left + whole + sum(4 * math.prod(shape_of(v)) for v in slices.whole
                                          if v in active)  # fmt: skip
