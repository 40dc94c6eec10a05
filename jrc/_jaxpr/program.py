"""A jaxpr with its dataflow: the producer and the consumers of each value, marks and slices.

>>> import jax, jax.numpy as jnp
>>> program = Program(jax.make_jaxpr(lambda x: jnp.tanh(x) * 2)(jnp.ones(3)))
>>> [eqn.primitive.name for eqn in program.eqns], program.producer[program.jaxpr.outvars[0]]
(['tanh', 'mul'], 1)
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jrc._jaxpr.atoms import variables
from jrc._jaxpr.cost import equation_flops
from jrc._jaxpr.dce import live_positions
from jrc._jaxpr.equations import construct_name, inner_programs, walk
from jrc._jaxpr.mark import mark_of, numbered_marks
from jrc._jaxpr.source_info import label, place
from jrc._jaxpr.varying_casts import casts_of, is_cast, source_of

INPUT = -1
"""The producer of the program's inputs."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A jaxpr with its dataflow; an equation is identified by its position in program order."""

    jaxpr: Jaxpr

    @property
    def eqns(self) -> Sequence[JaxprEqn]:
        """The equations in program order."""
        return self.jaxpr.eqns

    @property
    def given(self) -> tuple[Var, ...]:
        """The inputs, then the constants."""
        return (*self.jaxpr.invars, *self.jaxpr.constvars)

    @property
    def constants(self) -> dict[Var, jax.Array]:
        """The values of the constants."""
        values = map(jnp.asarray, self.jaxpr.consts)
        return dict(zip(self.jaxpr.constvars, values, strict=True))

    @cached_property
    def producer(self) -> Mapping[Var, int]:
        """The equation that makes each variable; `INPUT` for inputs."""
        made = {var: INPUT for var in self.given}
        return made | {var: i for i, eqn in enumerate(self.eqns) for var in eqn.outvars}

    @cached_property
    def consumers(self) -> Mapping[Var, tuple[int, ...]]:
        """The live equations that read each variable, in order; the results count as one more."""
        used: dict[Var, list[int]] = {}
        for i, (eqn, live) in enumerate(zip(self.eqns, self.live(), strict=True)):
            for var in variables(eqn.invars if live else ()):
                used.setdefault(var, []).append(i)
        for var in variables(self.jaxpr.outvars):
            used.setdefault(var, []).append(len(self.eqns))
        return {var: tuple(positions) for var, positions in used.items()}

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The positions of all equations but casts, which only occur inside `shard_map`."""
        return tuple(i for i, eqn in enumerate(self.eqns) if not is_cast(eqn))

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """The floating-point operations of each equation, its inner programs included."""
        return tuple(map(equation_flops, self.eqns))

    @cached_property
    def known_axes(self) -> dict[Any, Any]:
        """What `remembered` knows of the independent axes of the equations."""
        return {}

    def source(self, atom: Any) -> Any:
        """Return the atom that was cast to vary over a mesh axis, or the atom itself."""
        return source_of(atom, self._casts)

    @cached_property
    def _casts(self) -> Mapping[Var, JaxprEqn]:
        return casts_of(self.eqns)

    @cached_property
    def marks(self) -> Mapping[str, tuple[int, ...]]:
        """Every mark with its equations, in program order; repeated ones as `name`, `name#2`, …."""
        return numbered_marks(self.eqns)

    @cached_property
    def hidden_marks(self) -> Mapping[str, str]:
        """Marks inside another construct, each with a description of the construct."""
        return {
            name: f"{construct_name(eqn)} at {place(eqn)}"
            for eqn in self.eqns
            for name in _deep(eqn)
        }

    def unmarked(self, var: Var) -> Var:
        """Return the variable before it was marked: a mark names a value, it does not make one."""
        while (i := self.producer[var]) != INPUT and mark_of(self.eqns[i]) is not None:
            operand = self.eqns[i].invars[0]
            if isinstance(operand, Literal):
                break
            var = operand
        return var

    @cached_property
    def names(self) -> Mapping[Var, str]:
        """The first mark of every marked value, by its unmarked variable."""
        return {
            self.unmarked(self.eqns[i].outvars[0]): name
            for name, positions in reversed(list(self.marks.items()))
            for i in positions
        }

    def marked(self, name: str) -> tuple[Var, ...]:
        """Return the values with this mark, as they were before it."""
        return tuple(self.unmarked(self.eqns[i].outvars[0]) for i in self.marks[name])

    def matching_marks(self, name: str) -> tuple[str, ...]:
        """Return the marks that a name means: `name#2` that one, a name without number all."""
        if "#" in name:
            return (name,) if name in self.marks else ()
        return tuple(known for known in self.marks if known.partition("#")[0] == name)

    def name(self, i: int) -> str:
        """Return a name for the result of equation `i`: its mark, else operator and source line."""
        marked = [self.names[var] for var in self.eqns[i].outvars if var in self.names]
        return marked[0] if marked else label(self.eqns[i])

    def live(
        self, outvars: Iterable[Any] | None = None, given: str | None = None
    ) -> tuple[bool, ...]:
        """Return, for each equation, whether some of the given variables depend on it.

        An equation with an effect (`jax.debug.print`) is always live.

        Args:
            outvars: The variables; all results by default.
            given: A mark whose values are known: they need no equations that make them.
        """
        if outvars is None and given is None:
            return self._live
        outvars = self.jaxpr.outvars if outvars is None else outvars

        def reads(i: int) -> Iterable[Any]:
            is_given = given is not None and (mark_of(self.eqns[i]) or [None])[0] == given
            return () if is_given else self.eqns[i].invars

        return self._live_among(outvars, reads)

    @cached_property
    def _live(self) -> tuple[bool, ...]:
        return self._live_among(self.jaxpr.outvars)

    def _live_among(
        self, outvars: Iterable[Any], reads: Callable[[int], Iterable[Any]] | None = None
    ) -> tuple[bool, ...]:
        live = set(live_positions(self.eqns, outvars, reads)[0])
        return tuple(i in live for i in range(len(self.eqns)))

    def crossing(self, positions: Iterable[int]) -> tuple[Var, ...]:
        """Return the values that these equations make and others, or the results, read."""
        inside = set(positions)
        return tuple(
            var
            for i in sorted(inside)
            for var in self.eqns[i].outvars
            if not inside.issuperset(self.consumers.get(var, ()))
        )

    def reads(self, i: int) -> tuple[Var, ...]:
        """Return the variables that equation `i` reads, each once."""
        return self._reads[i]

    @cached_property
    def _reads(self) -> tuple[tuple[Var, ...], ...]:
        return tuple(tuple(dict.fromkeys(variables(eqn.invars))) for eqn in self.eqns)

    def sources(self, i: int) -> tuple[Var, ...]:
        """Return the variables that equation `i` reads, each as it was before it was cast."""
        return tuple(dict.fromkeys(variables(map(self.source, self.eqns[i].invars))))

    def run(self, i: int, run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """Turn a function of all arguments of equation `i` into one of the variables it `reads`."""
        atoms, read = self.eqns[i].invars, self.reads(i)

        def call(*inputs: Any) -> Sequence[Any]:
            values = dict(zip(read, inputs, strict=True))
            return run(*(x.val if isinstance(x, Literal) else values[x] for x in atoms))

        return call

    def results(self, values: Mapping[Var, Any]) -> list[Any]:
        """Return the program's results, from the values of its variables."""
        return [x.val if isinstance(x, Literal) else values[x] for x in self.jaxpr.outvars]

    def cut(self, positions: Iterable[int], outvars: Sequence[Any] | None = None) -> Jaxpr:
        """Return these equations as a program.

        Args:
            positions: The equations.
            outvars: Its results; by default `crossing`, the values that others read. Its inputs
                are the values that the equations read and do not make.
        """
        inside = sorted(set(positions))
        eqns = [self.eqns[i] for i in inside]
        made = {var for eqn in eqns for var in eqn.outvars}
        # A dict, not a set: the order of inputs must be the same in every process. The operand of
        # a cast is listed where the cast value is read: then the order is that without `shard_map`.
        casts = casts_of(eqns)
        steps = [eqn for eqn in eqns if not is_cast(eqn)]
        atoms = (source_of(x, casts) for eqn in (*steps, *casts.values()) for x in eqn.invars)
        read = dict.fromkeys(variables(atoms))
        return self.jaxpr.replace(
            constvars=[],
            invars=[var for var in read if var not in made],
            outvars=list(self.crossing(inside) if outvars is None else outvars),
            eqns=eqns,
            effects=frozenset().union(*(eqn.effects for eqn in eqns)),
        )


def evaluate(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """Return the program as a function of its inputs."""
    return jaxpr_as_fun(jaxpr)


def _deep(eqn: JaxprEqn) -> list[str]:
    """Return the names of all marks inside the programs that an equation carries."""
    inner = (each for jaxpr in inner_programs(eqn) for each, _ in walk(jaxpr))
    return [mark[0] for each in inner if (mark := mark_of(each)) and mark[0]]
