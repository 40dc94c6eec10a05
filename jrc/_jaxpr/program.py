"""A function as a program: equations in order, who makes and who uses each value, and slices.

>>> import jax, jax.numpy as jnp
>>> program = Program(jax.make_jaxpr(lambda x: jnp.tanh(x) * 2)(jnp.ones(3)))
>>> [eqn.primitive.name for eqn in program.eqns], program.producer[program.jaxpr.outvars[0]]
(['tanh', 'mul'], 1)
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeGuard

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jrc._jaxpr.dce import live_positions
from jrc._jaxpr.equations import construct_name, inner_programs
from jrc._jaxpr.mark import mark_of
from jrc._jaxpr.source_info import label, place
from jrc._jaxpr.varying_casts import casts_of, is_cast, source_of

INPUT = -1
"""The producer of what the program is given."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A jaxpr with its dataflow. Equations are known by their position in program order."""

    jaxpr: Jaxpr

    @property
    def eqns(self) -> Sequence[JaxprEqn]:
        """The equations in program order."""
        return self.jaxpr.eqns

    @cached_property
    def producer(self) -> Mapping[Var, int]:
        """The equation that makes each variable; `INPUT` for what is given."""
        made = {var: INPUT for var in (*self.jaxpr.constvars, *self.jaxpr.invars)}
        return made | {var: i for i, eqn in enumerate(self.eqns) for var in eqn.outvars}

    @cached_property
    def consumers(self) -> Mapping[Var, tuple[int, ...]]:
        """The live equations that read each variable, in order; the result counts as one more."""
        used: dict[Var, list[int]] = {}
        for i, (eqn, live) in enumerate(zip(self.eqns, self.live(), strict=True)):
            for var in _variables(eqn.invars if live else ()):
                used.setdefault(var, []).append(i)
        for var in _variables(self.jaxpr.outvars):
            used.setdefault(var, []).append(len(self.eqns))
        return {var: tuple(positions) for var, positions in used.items()}

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The positions of all equations but casts, which stand there only inside `shard_map`."""
        return tuple(i for i, eqn in enumerate(self.eqns) if not is_cast(eqn))

    def source(self, atom: Any) -> Any:
        """What an atom was before it was cast to vary over a mesh axis."""
        return source_of(atom, self._casts)

    @cached_property
    def _casts(self) -> Mapping[Var, JaxprEqn]:
        return casts_of(self.eqns)

    @cached_property
    def marks(self) -> Mapping[str, tuple[int, ...]]:
        """Every mark with its equations, in program order, told apart as `name`, `name#2`, ….

        One mark of a pytree is several equations, whose leaf numbers rise.
        """
        found: dict[str, list[list[int]]] = {}
        last: dict[str, int] = {}
        for i, eqn in enumerate(self.eqns):
            name, leaf = mark_of(eqn) or ("", 0)
            if not name:
                continue
            if leaf <= last.get(name, leaf):
                found.setdefault(name, []).append([])
            found[name][-1].append(i)
            last[name] = leaf
        named = {
            name if k == 0 else f"{name}#{k + 1}": tuple(positions)
            for name, calls in found.items()
            for k, positions in enumerate(calls)
        }
        return dict(sorted(named.items(), key=lambda item: item[1]))

    @cached_property
    def hidden_marks(self) -> Mapping[str, str]:
        """Marks that stand inside another construct, each with that construct in words."""
        return {
            name: f"{construct_name(eqn)} at {place(eqn)}"
            for eqn in self.eqns
            for name in _deep(eqn)
        }

    def unmarked(self, var: Var) -> Var:
        """The variable before it was marked: a mark names a value, it does not make one."""
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
        """The values, before they were marked, that carry this mark."""
        return tuple(self.unmarked(self.eqns[i].outvars[0]) for i in self.marks[name])

    def matching_marks(self, name: str) -> tuple[str, ...]:
        """The marks that a name means: with a number that one, a bare name all of them."""
        if "#" in name:
            return (name,) if name in self.marks else ()
        return tuple(known for known in self.marks if known.partition("#")[0] == name)

    def name(self, i: int) -> str:
        """What a person calls the result of equation `i`: its mark, else operator and line."""
        marked = [self.names[var] for var in self.eqns[i].outvars if var in self.names]
        return marked[0] if marked else label(self.eqns[i])

    def live(
        self, outvars: Iterable[Any] | None = None, given: str | None = None
    ) -> tuple[bool, ...]:
        """Which equations the given variables (all results, if none are given) depend on.

        An equation with an effect (`jax.debug.print`) always counts. Values that carry the mark
        `given` are there already: what makes them does not count for their sake.
        """
        outvars = self.jaxpr.outvars if outvars is None else outvars

        def reads(i: int) -> Iterable[Any]:
            is_given = given is not None and (mark_of(self.eqns[i]) or [None])[0] == given
            return () if is_given else self.eqns[i].invars

        live = set(live_positions(self.eqns, outvars, reads)[0])
        return tuple(i in live for i in range(len(self.eqns)))

    def crossing(self, positions: Iterable[int]) -> tuple[Var, ...]:
        """What these equations make and others, or the result, use."""
        inside = set(positions)
        return tuple(
            var
            for i in sorted(inside)
            for var in self.eqns[i].outvars
            if not inside.issuperset(self.consumers.get(var, ()))
        )

    def reads(self, i: int) -> tuple[Var, ...]:
        """The variables that equation `i` reads, each once."""
        return tuple(dict.fromkeys(_variables(self.eqns[i].invars)))

    def sources(self, i: int) -> tuple[Var, ...]:
        """The same, each as it was before it was cast."""
        return tuple(dict.fromkeys(_variables(map(self.source, self.eqns[i].invars))))

    def run(self, i: int, run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """A function of all arguments of equation `i` as one of the variables that it `reads`."""
        atoms, read = self.eqns[i].invars, self.reads(i)

        def call(*inputs: Any) -> Sequence[Any]:
            values = dict(zip(read, inputs, strict=True))
            return run(*(x.val if isinstance(x, Literal) else values[x] for x in atoms))

        return call

    def results(self, values: Mapping[Var, Any]) -> list[Any]:
        """The program's results, from the values of its variables."""
        return [x.val if isinstance(x, Literal) else values[x] for x in self.jaxpr.outvars]

    def cut(self, positions: Iterable[int], outvars: Sequence[Any] | None = None) -> Jaxpr:
        """These equations as a program: what they read and do not make, to what crosses out."""
        inside = sorted(set(positions))
        eqns = [self.eqns[i] for i in inside]
        made = {var for eqn in eqns for var in eqn.outvars}
        # A dict, not a set: the order of inputs must be the same in every process. What is cast
        # counts where the cast value is read, so that it is the same inside of `shard_map` too.
        casts = casts_of(eqns)
        steps = [eqn for eqn in eqns if not is_cast(eqn)]
        atoms = (source_of(x, casts) for eqn in (*steps, *casts.values()) for x in eqn.invars)
        read = dict.fromkeys(_variables(atoms))
        return self.jaxpr.replace(
            constvars=[],
            invars=[var for var in read if var not in made],
            outvars=list(self.crossing(inside) if outvars is None else outvars),
            eqns=eqns,
            effects=frozenset().union(*(eqn.effects for eqn in eqns)),
        )


def is_atom(x: Any) -> bool:
    """Whether this stands for a value in a program, and is not a value itself."""
    return isinstance(x, Var | Literal)


def is_variable(x: Any) -> TypeGuard[Var]:
    """Whether this stands for a value that a program is given or makes, and is no constant."""
    return isinstance(x, Var)


def evaluate(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """The program as a function of its inputs."""
    return jaxpr_as_fun(jaxpr)


def _variables(atoms: Iterable[Any]) -> Iterable[Var]:
    return (atom for atom in atoms if isinstance(atom, Var))


def _deep(eqn: JaxprEqn) -> list[str]:
    """The names of all marks inside the programs that an equation carries."""
    names = []
    for jaxpr in inner_programs(eqn):
        for inner in jaxpr.eqns:
            mark = mark_of(inner)
            names += [mark[0]] if mark else _deep(inner)
    return [name for name in names if name]
