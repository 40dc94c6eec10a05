"""A program in which regions are looked for, and the programs inside of its equations.

>>> import jax, jax.numpy as jnp
>>> loop = lambda w, xs: jax.lax.scan(lambda c, x: (c + jnp.sum(w * x), None), 0.0, xs)[0]
>>> program = Program(jax.make_jaxpr(loop)(1.0, jnp.ones((3, 2))))
>>> given = SearchedProgram(program, None, (), ends=[0], perturbed=[0])
>>> (k,) = [k for k, p in enumerate(program.steps) if replaceable_programs(program.eqns[p])]
>>> [(each.path == (k,), each.ends, each.perturbed) for each in given.inside(k)]
[(True, [0], [0, 1])]
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import (
    Program,
    SplitValues,
    inlined_program,
    inputs_of_programs,
    is_variable,
    loop_parts,
    primitive_name,
    replaceable_programs,
)
from jrc.remat._chunks.chunks import Form
from jrc.remat._chunks.form import program_in_form
from jrc.remat._gradient.activity import active_variables


@dataclasses.dataclass(frozen=True, eq=False)
class SearchedProgram:
    """A program in which regions are looked for.

    Attributes:
        program: The program.
        split: How devices split its values.
        path: The equations around it, as `Chunks.path` has them.
        ends: Which of its results are differentiated.
        perturbed: The inputs that they are differentiated by.
    """

    program: Program
    split: SplitValues | None
    path: tuple[int, ...]
    ends: Sequence[int]
    perturbed: Sequence[int]

    @functools.cached_property
    def active(self) -> set[Any]:
        """The values that a derivative flows through."""
        inputs, results = self.program.jaxpr.invars, self.program.jaxpr.outvars
        by, wanted = [inputs[i] for i in self.perturbed], [results[i] for i in self.ends]
        return active_variables(self.program, by, wanted)

    def is_active(self, atom: Any) -> bool:
        """Return whether a derivative flows through an operand."""
        return is_variable(atom) and atom in self.active

    def in_form(self, form: Form) -> "SearchedProgram":
        """Return the same in a form of the program."""
        new = program_in_form(self.program, form)
        if new is self.program:
            return self
        split = self.split and self.split.of_program(new)
        return dataclasses.replace(self, program=new, split=split)

    def inside(self, k: int) -> "list[SearchedProgram]":
        """Return the programs inside of an equation: of a loop, of a conditional, of a region.

        Args:
            k: The number of the equation.
        """
        eqn = self.program.eqns[self.program.steps[k]]
        programs = replaceable_programs(eqn)
        paths = [(*self.path, k)]
        if primitive_name(eqn) == "cond":
            paths = [(*self.path, k, i) for i in range(len(programs))]
        operands, results = inputs_of_programs(eqn), eqn.outvars
        perturbed = [self.is_active(x) for x in operands]
        ends = [v in self.active for v in results]
        if primitive_name(eqn) == "scan":
            consts, carried = loop_parts(eqn)
            for i in range(carried):
                ends[i] = perturbed[consts + i] = perturbed[consts + i] or ends[i]
        found = []
        for path, jaxpr in zip(paths, programs, strict=True):
            body = inlined_program(jaxpr)
            inside = self.split and self.split.inside(eqn, body)
            found.append(SearchedProgram(body, inside, path, _numbers(ends), _numbers(perturbed)))
        return found


def _numbers(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]
