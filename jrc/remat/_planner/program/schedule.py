"""The order in which a plan runs the equations of a program."""

from jrc._jaxpr import INPUT, Program, has_effects, inner_programs
from jrc.remat._planner.costs.compilers import Compiler


def schedule(program: Program, compiler: Compiler) -> list[int]:
    """Return the positions of the live equations, cheap values of inputs just before a reader.

    A table or a cast of a parameter that stands far from its reader would be live all the way.

    Args:
        program: The program.
        compiler: The platform's compiler: cheap is what it fuses into readers.
    """
    live = program.live()
    light: set[int] = set()
    for p, eqn in enumerate(program.eqns):
        makers = [program.producer[v] for v in program.reads(p)]
        plain = not inner_programs(eqn) and not has_effects(eqn) and compiler.fuses(eqn)
        if live[p] and plain and all(q == INPUT or q in light for q in makers):
            light.add(p)
    order: list[int] = []
    done: set[int] = set()
    for p in range(len(program.eqns)):
        if live[p] and p not in light:
            needed = _with_light_makers(program, p, light, done)
            done |= needed
            order += sorted(needed)
    return order + sorted(light - done)


def _with_light_makers(program: Program, p: int, light: set[int], done: set[int]) -> set[int]:
    """An equation, and the light ones that its operands are made by and that have not run."""
    found, open_ = {p}, [p]
    while open_:
        makers = {program.producer[v] for v in program.reads(open_.pop())}
        more = (makers & light) - done - found
        found |= more
        open_ += more
    return found
