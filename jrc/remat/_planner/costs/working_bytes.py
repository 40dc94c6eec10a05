"""Bytes that a program needs for a moment while it runs, beside its inputs and results.

>>> import jax, jax.numpy as jnp
>>> from jrc.remat._planner.costs.compilers import CPU
>>> fn = lambda x: jnp.sum(x @ x, axis=0) @ x
>>> working_bytes(Program(jax.make_jaxpr(fn)(jnp.ones((8, 8)))), CPU)
288
"""

from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import INPUT, Program, inline_marked, inner_programs, is_variable
from jrc.remat._planner.costs.compilers import Compiler


def working_bytes(program: Program, compiler: Compiler) -> int:
    """Return the most bytes of values made inside that lie in memory at one time.

    What the compiler computes inside of its readers takes none.

    Args:
        program: The program.
        compiler: What is assumed of the platform's compiler.
    """
    live = [p for p, is_live in enumerate(program.live()) if is_live]
    written = [p for p in live if not compiler.fuses(program.eqns[p])]
    last = _last_readers(program, live, compiler)
    results = set(filter(is_variable, program.jaxpr.outvars))
    held = most = 0
    freed: dict[int, int] = {}
    for p in written:
        eqn = program.eqns[p]
        for v in eqn.outvars:
            size = compiler.value_bytes(program, v)
            held += size
            if v not in results:
                end = last.get(v, p)
                freed[end] = freed.get(end, 0) + size
        inside = (Program(inline_marked(each, lambda _: True)) for each in inner_programs(eqn))
        most = max(most, held + max((working_bytes(each, compiler) for each in inside), default=0))
        held -= freed.pop(p, 0)
    return most


def _last_readers(program: Program, live: Sequence[int], compiler: Compiler) -> dict[Any, int]:
    """The last equation that reads each value and is written, directly or through others."""
    sources: dict[Any, set[Any]] = {}
    last: dict[Any, int] = {}
    for p in live:
        read: set[Any] = set()
        for v in program.reads(p):
            read |= sources.get(v, {v} if program.producer[v] != INPUT else set())
        if compiler.fuses(program.eqns[p]):
            sources |= {v: read for v in program.eqns[p].outvars}
        else:
            last |= dict.fromkeys(read, p)
    return last
