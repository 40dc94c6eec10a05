"""Which equations of a segment JAX recomputes: those that its residuals depend on.

The segment is differentiated with each equation under a name scope of its own. The residuals of
the derivative are then followed back: an equation whose scope is met on the way is recomputed.
This asks JAX instead of a table of derivative rules, and is true with `jax_remat3` off and on.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from jrc._jaxpr import (
    Program,
    Traced,
    bind_mark,
    inline_all,
    inner_programs,
    is_atom,
    primitive_name,
    trace,
)
from jrc.remat._policy.checkpoint_names import SAVED
from jrc.remat._segments.cut import SectionedProgram
from jrc.remat._segments.run_sections import run_section

_SCOPE = "jrc_equation_"


def rerun_positions(traced: Traced, sections: SectionedProgram) -> list[tuple[int, ...]]:
    """Return for each section the equations that the backward pass recomputes, in order."""
    program = traced.program
    probe = trace(lambda *inputs: _residuals(program, sections, inputs), traced.inputs, {})
    saved = probe.result.fill(probe.program.jaxpr.outvars)
    # Anything else is a constant, which nothing recomputes.
    saved = [[var for var in residuals if is_atom(var)] for residuals in saved]
    outvars = [var for residuals in saved for var in residuals]
    # Without `jit` calls, of which a residual may need a part only.
    flat = Program(inline_all(probe.program.jaxpr.replace(outvars=outvars)))
    at = _by_equation(flat)
    found, start = [], 0
    for section, residuals in zip(sections.sections, saved, strict=True):
        stop = start + len(residuals)
        live = flat.live(flat.jaxpr.outvars[start:stop], given=SAVED) if section.recompute else ()
        found.append(
            tuple(p for p in section.positions if live and _is_rerun(program, p, flat, at, live))
        )
        start = stop
    return found


def _by_equation(probe: Program) -> dict[int, list[int]]:
    """The probe's equations by the equation of the program in whose scope they stand."""
    found: dict[int, list[int]] = {}
    for i, eqn in enumerate(probe.eqns):
        if scope := re.findall(rf"{_SCOPE}(\d+)", str(eqn.source_info.name_stack)):
            found.setdefault(int(scope[-1]), []).append(i)
    return found


def _is_rerun(
    program: Program, p: int, probe: Program, at: dict[int, list[int]], live: Sequence[bool]
) -> bool:
    """Whether equation `p` is met on the way from the residuals back to the inputs."""
    own = at.get(p, [])
    if inner_programs(program.eqns[p]):
        # A residual may need a part of the program inside: that counts too.
        return any(live[i] for i in own)
    # The value itself comes first in its scope; what its derivative adds follows.
    name = primitive_name(program.eqns[p])
    return next((live[i] for i in own if primitive_name(probe.eqns[i]) == name), False)


def _residuals(
    program: Program, sections: SectionedProgram, inputs: Sequence[Any]
) -> list[list[Any]]:
    """The residuals of the body of each section, in order."""
    values = dict(zip(program.jaxpr.invars, inputs, strict=True))
    found: list[list[Any]] = []

    def region(body: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        results, vjp = jax.vjp(body, *inputs)
        found[-1] += jax.tree.leaves(vjp)
        return results

    # Saved values carry a mark in place of JAX's name: `rerun_positions` looks for it.
    options: dict[str, Any] = {"name": lambda x, _: bind_mark(x, SAVED, 0), "scope": _scope}
    for section in sections.sections:
        found.append([])
        more = options if section.recompute else {}
        run_section(program, section, sections.policy, values, region, **more)
    return found


def _scope(p: int) -> AbstractContextManager[Any]:
    return jax.named_scope(f"{_SCOPE}{p}")
