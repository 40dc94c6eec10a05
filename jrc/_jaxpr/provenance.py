"""Find the equation that computes a value, at any depth of a program.

Names, marks and reshapes make views of a value, and loops, calls and regions return it from inside.
None of them computes it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jrc._jaxpr.control_flow import loop_parts
from jrc._jaxpr.cost import nbytes
from jrc._jaxpr.equations import construct_name, inner_programs, repeats
from jrc._jaxpr.mark import numbered_marks
from jrc._jaxpr.primitives import facts_of, primitive_name
from jrc._jaxpr.source_info import UNKNOWN, place

_ROUNDED = "reduce_precision"
# A value that a loop passes from step to step is followed through this many steps.
_MOST_STEPS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """A program, and the equation of an outer program that contains it.

    Attributes:
        jaxpr: The program.
        outside: The scope of the outer program; `None` for the whole program.
        eqn: The equation of the outer program that contains it.
    """

    jaxpr: Jaxpr
    outside: "Scope | None" = None
    eqn: JaxprEqn | None = None

    @cached_property
    def producer(self) -> Mapping[Var, tuple[JaxprEqn, int]]:
        """The equation that makes each variable, and the number of the result."""
        return {v: (eqn, k) for eqn in self.jaxpr.eqns for k, v in enumerate(eqn.outvars)}

    @cached_property
    def inputs(self) -> Mapping[Var, int]:
        """The position of each input; constants have negative positions."""
        given = (*self.jaxpr.constvars, *self.jaxpr.invars)
        return {v: k - len(self.jaxpr.constvars) for k, v in enumerate(given)}

    @cached_property
    def marks(self) -> Mapping[Var, str]:
        """The first mark of every marked value; repeated ones as `name`, `name#2`, …."""
        marks = numbered_marks(self.jaxpr.eqns).items()
        found: dict[Var, str] = {}
        for i, name in sorted((i, name) for name, positions in marks for i in positions):
            (operand, *_) = self.jaxpr.eqns[i].invars
            if isinstance(operand, Var) and not name.startswith("jrc."):
                found.setdefault(self.unviewed(operand), name)
        return found

    @cached_property
    def inner(self) -> dict[tuple[int, int], "Scope"]:
        """The scopes of programs inside, one object each, so that they can be compared."""
        return {}

    def into(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> "Scope":
        """Return the scope of a program that an equation of this one contains.

        Two equations may contain one program, as two calls of a jitted function do.
        """
        return self.inner.setdefault((id(eqn), id(jaxpr)), Scope(jaxpr, self, eqn))

    def unviewed(self, var: Var) -> Var:
        """Return the value that a variable is a view of, in the same program."""
        return list(self.views(var))[-1]

    def views(self, var: Var) -> Iterator[Var]:
        """Yield a variable, the one that it is a view of, and so on."""
        yield var
        while var in self.producer:
            eqn, k = self.producer[var]
            k = _viewed(eqn, k)
            viewed = None if k is None else eqn.invars[k]
            if not isinstance(viewed, Var):
                break
            yield (var := viewed)

    def is_copy(self, var: Var) -> bool:
        """Return whether a variable is a rounded copy, which has memory of its own."""
        return var in self.producer and primitive_name(self.producer[var][0]) == _ROUNDED


@dataclasses.dataclass(frozen=True)
class Origin:
    """The equation that computes a value.

    Attributes:
        scope: The program in which it is computed, or whose input it is.
        var: The variable there.
        eqn: The equation; `None` for an input of the whole program.
        mark: The value's mark, if it has one.
        times: How many of the value there are: the length of the loops that stack it.
        aval: The type of one of them.
        steps: The number of loop steps between the one that computes it and the one that reads it.
        copies: The number of roundings (`reduce_precision`) since: `jax.checkpoint` saves a rounded
            copy, and with `jax_remat3` the value beside it.
    """

    scope: Scope
    var: Any
    eqn: JaxprEqn | None
    mark: str | None = None
    times: int = 1
    aval: Any = None
    steps: int = 0
    copies: int = 0

    @property
    def key(self) -> Any:
        """A key that is equal for variables with the same memory."""
        return id(self.scope), self.var, self.times, self.steps, self.copies

    @property
    def bytes(self) -> int:
        """Bytes of all of them together; inside `shard_map` on one device."""
        return nbytes(self.aval) * self.times

    @property
    def place(self) -> str:
        """The source line of the equation, or of the innermost outer equation that has one."""
        eqn, scope = self.eqn, self.scope
        while eqn is not None and place(eqn) == UNKNOWN and scope.outside is not None:
            eqn, scope = scope.eqn, scope.outside
        return UNKNOWN if eqn is None else place(eqn)

    @property
    def constructs(self) -> tuple[str, ...]:
        """The constructs around the equation, outermost first: `lax.scan at net.py:7`."""
        found, scope = [], self.scope
        while scope.eqn is not None and scope.outside is not None:
            if primitive_name(scope.eqn) != "jit":
                found.append(f"{construct_name(scope.eqn)} at {place(scope.eqn)}")
            scope = scope.outside
        return tuple(found[::-1])


def origin_of(scope: Scope, var: Var) -> Origin:
    """Return the equation that computes a variable of this program, at any depth."""
    return _trace(Origin(scope, var, None, aval=var.aval))


def _trace(at: Origin) -> Origin:
    """Follow a variable to the equation that computes it."""
    scope, chain = at.scope, list(at.scope.views(at.var))
    var, copies = chain[-1], at.copies + sum(scope.is_copy(each) for each in chain)
    at = dataclasses.replace(at, var=var, mark=at.mark or scope.marks.get(var), copies=copies)
    if var in scope.inputs:
        return _from_outside(at)
    eqn, k = scope.producer[var]
    for inner, atom, count in _made_inside(scope, eqn, k):
        if isinstance(atom, Literal):
            continue
        at = dataclasses.replace(at, aval=atom.aval, times=at.times * count)
        made = _trace(dataclasses.replace(at, scope=inner, var=atom))
        # An input that a loop stacks is stored once more.
        if made.eqn is not None or (made.scope.outside is None and count == 1):
            return made
        break
    return dataclasses.replace(at, eqn=eqn)


def _made_inside(scope: Scope, eqn: JaxprEqn, k: int) -> Sequence[tuple[Scope, Any, int]]:
    """Return the variables inside that may be result `k`, and how many of each are stacked."""
    name, programs = primitive_name(eqn), inner_programs(eqn)
    if name == "while" or not programs:
        return ()
    scopes = [scope.into(each, eqn) for each in programs]
    if name == "scan":
        _, carried = loop_parts(eqn)
        times = repeats(eqn) if k >= carried else 1
        return [(scopes[0], programs[0].outvars[k], times)]
    if name == "cond":
        # A branch that does not compute the value returns zeros.
        pairs = [(s, each.outvars[k], 1) for s, each in zip(scopes, programs, strict=True)]
        return sorted(pairs, key=lambda pair: _is_filling(*pair[:2]))
    if len(programs) == 1 and len(programs[0].outvars) == len(eqn.outvars):
        return [(scopes[0], programs[0].outvars[k], 1)]
    return ()


def _from_outside(at: Origin) -> Origin:
    """Follow an input of an inner program to the operand of the equation around it."""
    scope, eqn = at.scope, at.scope.eqn
    if scope.outside is None or eqn is None or scope.inputs[at.var] < 0:
        return at
    k, name = scope.inputs[at.var], primitive_name(eqn)
    if name == "cond":
        k += 1
    elif name == "scan":
        consts, carried = loop_parts(eqn)
        if consts <= k < consts + carried:
            # The carry of a step is a result of the step before it.
            made = scope.jaxpr.outvars[k - consts]
            is_new = isinstance(made, Var) and scope.unviewed(made) in scope.producer
            more = dataclasses.replace(at, var=made, steps=at.steps + 1)
            return _trace(more) if is_new and at.steps < _MOST_STEPS else at
    if k >= len(eqn.invars) or isinstance(eqn.invars[k], Literal):
        return at
    return _trace(dataclasses.replace(at, scope=scope.outside, var=eqn.invars[k]))


def _viewed(eqn: JaxprEqn, k: int) -> int | None:
    """Return the number of the operand that result `k` is a view of."""
    # Result k of `optimization_barrier` and `device_put` is operand k; other views have one result.
    return k if facts_of(eqn).is_view else None


def _is_filling(scope: Scope, atom: Any) -> bool:
    """Return whether an atom is a constant array, such as the zeros of another branch."""
    made = scope.producer.get(atom) if isinstance(atom, Var) else None
    return made is None or primitive_name(made[0]) == "broadcast_in_dim"
