"""Following one axis through a program: what is computed slice by slice, and from what.

>>> import jax, jax.numpy as jnp
>>> from jrc._jaxpr.independent_axes import independent_axes
>>> loss = lambda x, w: jnp.sum(jnp.tanh(x @ w))
>>> program = Program(jax.make_jaxpr(loss)(jnp.ones((8, 3)), jnp.ones((3, 4))))
>>> slices = sliced(program, {program.jaxpr.invars[0]: 0}, independent_axes)
>>> [program.eqns[step.position].primitive.name for step in slices.steps], slices.parts
(['dot_general', 'tanh', 'reduce_sum'], 8)
>>> slices.sums == tuple(program.jaxpr.outvars)
True
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
from jax.extend.core import JaxprEqn, Var

from jrc._jaxpr import primitives
from jrc._jaxpr.atoms import is_variable, shape_of
from jrc._jaxpr.axis_rules import IndependentAxis
from jrc._jaxpr.equations import has_effects
from jrc._jaxpr.made_inside import MadeInside, Place
from jrc._jaxpr.program import Program
from jrc._jaxpr.sums_onto_zeros import with_sums_onto_zeros
from jrc._tree import is_floating


class Dependent(Exception):
    """An axis is not independent.

    Attributes:
        eqn: The equation that needs more than a slice.
        reason: Why, with the equation as its subject.
    """

    def __init__(self, eqn: JaxprEqn, reason: str) -> None:
        super().__init__(reason)
        self.eqn, self.reason = eqn, reason


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation that runs on slices.

    Attributes:
        position: Its position in the program.
        axis: The axis.
        of_sums: Whether it is linear in sums, and runs on what each slice adds to them.
    """

    position: int
    axis: IndependentAxis
    of_sums: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Slices:
    """What of a program runs slice by slice.

    Attributes:
        program: The program.
        steps: The equations that run on slices, in program order. One that is read along two axes
            is there twice.
        given: Values that are made outside and cut into slices.
        whole: Values that are made outside and that every slice reads whole.
        axes: Where each value that the slices make has the axis, and each value that was given so.
        sums: Values that are sums of what the slices give.
        after: Equations that read sums, which run when all slices have run.
        parts: The length of the axis in units that may be told apart.
        seeds: The values that the walk began with, each with its axis.
    """

    program: Program
    steps: tuple[Step, ...]
    given: tuple[Place, ...]
    whole: tuple[Var, ...]
    axes: Mapping[Var, int]
    sums: tuple[Var, ...]
    after: tuple[int, ...]
    parts: int
    seeds: tuple[Place, ...]

    @functools.cached_property
    def read(self) -> tuple[Var, ...]:
        """The values that are made outside: those that are read whole, and those that are cut."""
        return (*self.whole, *(v for v, _ in self.given))

    @functools.cached_property
    def late(self) -> frozenset[Var]:
        """Sums, and what is made of them."""
        made = (v for p in self.after for v in self.program.eqns[p].outvars)
        return frozenset((*self.sums, *made))

    @functools.cached_property
    def made(self) -> frozenset[Var]:
        """The values of which slices make a part, or that are sums of what they give."""
        eqns = [self.program.eqns[step.position] for step in self.steps]
        return frozenset(v for eqn in eqns for v in eqn.outvars if v in self.axes or v in self.sums)

    @functools.cached_property
    def run(self) -> frozenset[int]:
        """The equations that run on slices or after them, and not on whole values."""
        steps = (step.position for step in self.steps)
        made = {p for p in steps if self.made.intersection(self.program.eqns[p].outvars)}
        return frozenset({*made, *self.after})

    @functools.cached_property
    def before(self) -> tuple[int, ...]:
        """The equations that run before, on whole values, for what the slices read."""
        read = [*(v for v, _ in self.given), *self.whole]
        return tuple(p for p, is_live in enumerate(self.program.live(read)) if is_live)


def is_linear_in(eqn: JaxprEqn, sums: Collection[Var]) -> bool:
    """Return whether an equation is linear in scalar sums, so that it may run on their parts.

    >>> import jax
    >>> eqns = jax.make_jaxpr(lambda a, b, n: (a / n, a + b, a * b, a + n))(1.0, 2.0, 3.0).eqns
    >>> [is_linear_in(eqn, eqns[1].invars) for eqn in eqns]
    [True, True, False, False]
    """
    if any(shape_of(v) or not is_floating(v.aval) for v in eqn.outvars):
        return False
    reads = [is_variable(x) and x in sums for x in eqn.invars]
    return primitives.is_linear_in(eqn, reads)


def counted(slices: Slices) -> list[jax.ShapeDtypeStruct]:
    """Return, for the numbers from 0 that a slice reads a slice of, the type of all of them."""
    return [
        jax.ShapeDtypeStruct((length,), dtype)
        for step in slices.steps
        for length, dtype in step.axis.counts
    ]


def sliced(
    program: Program,
    axes: Mapping[Var, int],
    independent_axes: Callable[[JaxprEqn], Sequence[IndependentAxis]],
    among: Collection[int] | None = None,
    inputs_alone: bool = False,
) -> Slices:
    """Return what of a program runs slice by slice, where some values are cut into slices.

    An equation that reads a slice runs on slices. What it reads beside it is cut too, where it has
    the axis; cheap values (masks, broadcast values, counts) are made inside of the slices, and so
    are random bits that are drawn by their position.

    Args:
        program: The program.
        axes: The values that are read in slices, each with its axis.
        independent_axes: The axes of an equation, see `IndependentAxis`.
        among: The equations that may run on slices; by default all that the results depend on.
        inputs_alone: Whether inputs alone are cut: then all that can be is made inside.

    Raises:
        Dependent: If an equation needs more than a slice of what it reads.
    """
    walk = _Walk(program, dict(axes), independent_axes, among or (), inputs_alone)
    if among is None:
        among = [p for p, is_live in enumerate(program.live()) if is_live]
    for p in sorted(among):
        walk.forward(p)
    walk.backward()
    return Slices(
        program,
        tuple(sorted(walk.steps, key=lambda step: step.position)),
        tuple(walk.given),
        tuple(walk.whole),
        walk.axes,
        tuple(walk.sums),
        tuple(walk.after),
        walk.parts,
        tuple(axes.items()),
    )


class _Walk:
    """The walk through a program; see `Slices` for what is found."""

    def __init__(
        self,
        program: Program,
        axes: dict[Var, int],
        independent_axes: Callable[[JaxprEqn], Sequence[IndependentAxis]],
        among: Collection[int],
        inputs_alone: bool,
    ) -> None:
        self.among, self.inputs_alone = frozenset(among), inputs_alone
        self.program, self.axes = program, axes
        self.independent_axes = with_sums_onto_zeros(program, independent_axes)
        self.steps: dict[Step, None] = {}
        self.demands: dict[Place, None] = {}
        self.given: dict[Place, None] = {}
        self.whole: dict[Var, None] = {}
        self.sums: dict[Var, None] = {}
        self.late: set[Var] = set()
        self.after: list[int] = []
        self.parts = 0
        self.made_inside = MadeInside(program, independent_axes)
        self.read = frozenset(axes)
        for v, axis in axes.items():
            self.parts = math.gcd(self.parts, shape_of(v)[axis])

    def forward(self, p: int) -> None:
        """Take an equation into the slices if it reads one."""
        eqn = self.program.eqns[p]
        read = {
            i: self.axes[x] for i, x in enumerate(eqn.invars) if is_variable(x) and x in self.axes
        }
        is_late = any(is_variable(x) and x in self.late for x in eqn.invars)
        if not read:
            others = self.late.difference(self.sums)
            reads_late = any(is_variable(x) and x in others for x in eqn.invars)
            if is_late and p in self.among and not reads_late and is_linear_in(eqn, self.sums):
                self._take_linear(p)
            elif is_late:
                self.after.append(p)
                self.late.update(eqn.outvars)
            return
        if is_late:
            raise Dependent(eqn, "reads a slice and a sum over all slices")
        if has_effects(eqn):
            raise Dependent(eqn, "has a side effect, which would run once a chunk")
        axis = self._axis(eqn, read)
        self._take(p, axis)
        if axis.is_summed:
            self.sums |= dict.fromkeys(eqn.outvars)
            self.late.update(eqn.outvars)
        else:
            made = zip(eqn.outvars, axis.results, strict=True)
            self.axes |= {v: at for v, at in made if at is not None}

    def _axis(self, eqn: JaxprEqn, read: Mapping[int, int]) -> IndependentAxis:
        known = self.independent_axes(eqn)
        fitting = [
            x
            for x in known
            if all(x.operands[i] == axis for i, axis in read.items())
            and not self._reads_same(eqn, x)
        ]
        if not fitting:
            raise Dependent(eqn, _reason(eqn, read))
        return fitting[0]

    def _reads_same(self, eqn: JaxprEqn, axis: IndependentAxis) -> bool:
        """Whether anything reads a result that is the same in all slices."""
        pairs = zip(eqn.outvars, axis.results, strict=True)
        same = [v for v, at in pairs if at is None and not axis.is_summed]
        return any(self.program.consumers.get(v) for v in same)

    def _take(self, p: int, axis: IndependentAxis) -> None:
        """Run an equation on slices: what it reads is a slice, is cut, or is read whole."""
        self.steps[Step(p, axis)] = None
        self.parts = math.gcd(self.parts, axis.parts)
        for x, at in zip(self.program.eqns[p].invars, axis.operands, strict=True):
            if not is_variable(x):
                continue
            if at is None:
                self.whole[x] = None
            elif x not in self.axes or x in self.read:
                self.demands[x, at] = None

    def _take_linear(self, p: int) -> None:
        eqn = self.program.eqns[p]
        none = (None,) * len(eqn.invars)
        axis = IndependentAxis(none, (None,) * len(eqn.outvars), self.parts, is_summed=True)
        self.steps[Step(p, axis, of_sums=True)] = None
        read = (x for x in eqn.invars if is_variable(x) and x not in self.sums)
        self.whole |= dict.fromkeys(read)
        self.sums |= dict.fromkeys(eqn.outvars)
        self.late.update(eqn.outvars)

    def backward(self) -> None:
        """Make what the slices read inside of them if that is cheap; else it is cut outside.

        What equations make that were said to run on slices is made inside whatever it costs.
        """
        done: set[Place] = set()
        while self.demands:
            place = max(self.demands, key=lambda place: self.program.producer[place[0]])
            del self.demands[place]
            if place in done:
                continue
            done.add(place)
            producer = self.program.producer[place[0]]
            is_inside = self.inputs_alone or producer in self.among
            find = self.made_inside.axis_of_any if is_inside else self.made_inside.axis
            axis = find(*place)
            if axis is None:
                self.given[place] = None
            else:
                self._take(producer, axis)


def _reason(eqn: JaxprEqn, read: Mapping[int, int]) -> str:
    places = ", ".join(f"axis {axis} of operand {i}" for i, axis in read.items())
    return f"does not compute slices along {places} by themselves"
