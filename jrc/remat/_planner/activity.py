"""What moves through a program, and the order in which its equations are best run."""

from collections.abc import Iterable
from typing import Any

from jrc._jaxpr import INPUT, Program, has_effects, inner_programs, is_variable, primitive_name
from jrc._tree import is_floating
from jrc.remat._planner.equation_kinds import is_fused


def active_variables(program: Program, inputs: Iterable[Any], wanted: Iterable[Any]) -> set[Any]:
    """The variables on the way from these inputs to these results, as far as a derivative goes."""
    perturbed, flowing = set(inputs), {x for x in wanted if is_variable(x)}
    through = [eqn for eqn in program.eqns if not _stops(eqn)]
    for eqn in through:
        if any(is_variable(x) and x in perturbed for x in eqn.invars):
            perturbed.update(v for v in eqn.outvars if is_floating(v.aval))
    for eqn in reversed(through):
        if not flowing.isdisjoint(eqn.outvars):
            flowing.update(x for x in eqn.invars if is_variable(x))
    return perturbed & flowing


def _stops(eqn: Any) -> bool:
    return primitive_name(eqn) == "stop_gradient" or eqn.params.get("stop") is True


def schedule(program: Program) -> list[int]:
    """The live equations in program order; what is made of inputs alone, just before it is read.

    A table or a cast of a parameter that stands far from its reader would be kept for long.
    """
    live = program.live()
    light: set[int] = set()
    for p, eqn in enumerate(program.eqns):
        made = [program.producer[v] for v in program.reads(p)]
        plain = not inner_programs(eqn) and not has_effects(eqn) and is_fused(eqn)
        if live[p] and plain and all(q == INPUT or q in light for q in made):
            light.add(p)
    order, done = [], set()

    def place(p: int) -> None:
        found, wanted = {p}, [p]
        while wanted:
            made = {program.producer[v] for v in program.reads(wanted.pop())}
            more = (made & light) - done - found
            found |= more
            wanted += more
        done.update(found)
        order.extend(sorted(found))

    for p in range(len(program.eqns)):
        if live[p] and p not in light:
            place(p)
    return order + sorted(light - done)
