"""Following a value back to the equation that really makes it.

A value goes through names, marks and reshapes, out of loops, calls and regions, before somebody
keeps it: none of that is what made it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jrc._jaxpr.control_flow import loop_parts
from jrc._jaxpr.cost import nbytes
from jrc._jaxpr.equations import construct_name, inner_programs
from jrc._jaxpr.mark import mark_of
from jrc._jaxpr.primitives import View, facts_of, primitive_name
from jrc._jaxpr.source_info import UNKNOWN, place

# What holds the same bytes as its operand.
_VIEWS = (View.NAME, View.ANNOTATION, View.RESHAPE, View.COPY)
_ROUNDED = "reduce_precision"
# A value that is handed from step to step through this many loops is followed no further.
_MOST_STEPS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """A program in its place: what it is inside of, and where it lies in that."""

    jaxpr: Jaxpr
    outside: "Scope | None" = None
    eqn: JaxprEqn | None = None

    @cached_property
    def producer(self) -> Mapping[Var, tuple[JaxprEqn, int]]:
        """The equation that makes each variable, and which of its results it is."""
        return {v: (eqn, k) for eqn in self.jaxpr.eqns for k, v in enumerate(eqn.outvars)}

    @cached_property
    def inputs(self) -> Mapping[Var, int]:
        """The position of each input; constants stand before the first."""
        given = (*self.jaxpr.constvars, *self.jaxpr.invars)
        return {v: k - len(self.jaxpr.constvars) for k, v in enumerate(given)}

    @cached_property
    def marks(self) -> Mapping[Var, str]:
        """The first mark of every marked value, by the value itself, names told apart."""
        found: dict[Var, str] = {}
        counts: dict[str, int] = {}
        last: dict[str, int] = {}
        for eqn in self.jaxpr.eqns:
            name, leaf = mark_of(eqn) or ("", 0)
            if not name or name.startswith("jrc.") or isinstance(eqn.invars[0], Literal):
                continue
            counts[name] = counts.get(name, 0) + (leaf <= last.get(name, leaf))
            last[name] = leaf
            told = name if counts[name] == 1 else f"{name}#{counts[name]}"
            found.setdefault(self.unviewed(eqn.invars[0]), told)
        return found

    @cached_property
    def inner(self) -> dict[int, "Scope"]:
        """Scopes of programs inside, made once each so that they can be compared."""
        return {}

    def into(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> "Scope":
        """The scope of a program that an equation of this one carries."""
        return self.inner.setdefault((id(eqn), id(jaxpr)), Scope(jaxpr, self, eqn))

    def unviewed(self, var: Var) -> Var:
        """The value before it was marked, named or given another shape, in the same program."""
        return list(self.views(var))[-1]

    def views(self, var: Var) -> Iterator[Var]:
        """A value, and what it is a view of, one after another."""
        yield var
        while var in self.producer:
            eqn, k = self.producer[var]
            k = _viewed(eqn, k)
            viewed = None if k is None else eqn.invars[k]
            if not isinstance(viewed, Var):
                break
            yield (var := viewed)

    def is_copy(self, var: Var) -> bool:
        """Whether a value is another one rounded, which takes room of its own."""
        return var in self.producer and primitive_name(self.producer[var][0]) == _ROUNDED


@dataclasses.dataclass(frozen=True)
class Origin:
    """Who makes a value.

    Attributes:
        scope: The program in which it is made, or of which it is an input.
        var: The value there.
        eqn: The equation that makes it; `None` for an input of the whole program.
        mark: Its mark, if it has one.
        times: How many of it there are: the length of the loops that stack it.
        aval: The type of one of them.
        steps: By how many steps of a loop it is older than the step that reads it.
        copies: How many rounded copies of copies it is: `jax.checkpoint` keeps such a one, and
            with `jax_remat3` the value beside it.
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
        """Equal for values that lie in one and the same place."""
        return id(self.scope), self.var, self.times, self.steps, self.copies

    @property
    def bytes(self) -> int:
        """All of them together; inside `shard_map` those of one device."""
        return nbytes(self.aval) * self.times

    @property
    def place(self) -> str:
        """The user's line: that of the equation, else of what it is inside of."""
        eqn, scope = self.eqn, self.scope
        while eqn is not None and place(eqn) == UNKNOWN and scope.outside is not None:
            eqn, scope = scope.eqn, scope.outside
        return UNKNOWN if eqn is None else place(eqn)

    @property
    def constructs(self) -> tuple[str, ...]:
        """The constructs inside of which it is made, outermost first: `lax.scan at net.py:7`."""
        found, scope = [], self.scope
        while scope.eqn is not None and scope.outside is not None:
            if primitive_name(scope.eqn) != "jit":
                found.append(f"{construct_name(scope.eqn)} at {place(scope.eqn)}")
            scope = scope.outside
        return tuple(found[::-1])


def origin_of(scope: Scope, var: Var) -> Origin:
    """Who makes a value of this program, at any depth."""
    return _trace(Origin(scope, var, None, aval=var.aval))


def _trace(at: Origin) -> Origin:
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
        # What a loop stacks is there once more, whoever made it.
        if made.eqn is not None or (made.scope.outside is None and count == 1):
            return made
        break
    return dataclasses.replace(at, eqn=eqn)


def _made_inside(scope: Scope, eqn: JaxprEqn, k: int) -> Sequence[tuple[Scope, Any, int]]:
    """Where a construct's result number `k` may come from, and how many of it are stacked."""
    name, programs = primitive_name(eqn), inner_programs(eqn)
    if name == "while" or not programs:
        return ()
    scopes = [scope.into(each, eqn) for each in programs]
    if name == "scan":
        _, carried = loop_parts(eqn)
        times = eqn.params["length"] if k >= carried else 1
        return [(scopes[0], programs[0].outvars[k], times)]
    if name == "cond":
        # A branch that does not make the value has zeros in its place.
        pairs = [(s, each.outvars[k], 1) for s, each in zip(scopes, programs, strict=True)]
        return sorted(pairs, key=lambda pair: _is_filling(*pair[:2]))
    if len(programs) == 1 and len(programs[0].outvars) == len(eqn.outvars):
        return [(scopes[0], programs[0].outvars[k], 1)]
    return ()


def _from_outside(at: Origin) -> Origin:
    """Through the input of an inner program to what is given there."""
    scope, eqn = at.scope, at.scope.eqn
    if scope.outside is None or eqn is None or scope.inputs[at.var] < 0:
        return at
    k, name = scope.inputs[at.var], primitive_name(eqn)
    if name == "cond":
        k += 1
    elif name == "scan":
        consts, carried = loop_parts(eqn)
        if consts <= k < consts + carried:
            # What a step is given is what the step before it returned.
            made = scope.jaxpr.outvars[k - consts]
            is_new = isinstance(made, Var) and scope.unviewed(made) in scope.producer
            more = dataclasses.replace(at, var=made, steps=at.steps + 1)
            return _trace(more) if is_new and at.steps < _MOST_STEPS else at
    if k >= len(eqn.invars) or isinstance(eqn.invars[k], Literal):
        return at
    return _trace(dataclasses.replace(at, scope=scope.outside, var=eqn.invars[k]))


def _viewed(eqn: JaxprEqn, k: int) -> int | None:
    """Which operand this equation only names or shapes anew, as its result number `k`."""
    # Result k of `optimization_barrier` and `device_put` is operand k; other views have one result.
    return k if facts_of(eqn).view in _VIEWS else None


def _is_filling(scope: Scope, atom: Any) -> bool:
    made = scope.producer.get(atom) if isinstance(atom, Var) else None
    return made is None or primitive_name(made[0]) == "broadcast_in_dim"
