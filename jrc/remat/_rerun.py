"""What JAX really re-runs: the equations of a segment that its derivative cannot do without.

Each equation runs under a name scope of its own while the segment is differentiated. What the
derivative keeps (its residuals) is then followed back: an equation whose scope is met on the way
must run again. This asks JAX instead of a table of derivative rules, and holds in both builds of
`jax.checkpoint`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._jaxpr import Program, Traced, bind_mark, evaluate, inner_programs, primitive_name, trace
from jrc.remat._cut import Cut, Cuts

_SCOPE = "jrc_equation_"
_HELD = "jrc.held"


def rerun_positions(traced: Traced, cuts: Cuts) -> list[tuple[int, ...]]:
    """For each segment, the equations that the backward pass runs again, in program order."""
    program = traced.program
    probe = trace(lambda *inputs: _residuals(program, cuts, inputs), traced.inputs, {})
    kept = probe.result.fill(probe.program.jaxpr.outvars)
    return [
        _met(program, cut, probe.program, residuals)
        for cut, residuals in zip(cuts.cuts, kept, strict=True)
    ]


def _residuals(program: Program, cuts: Cuts, inputs: Sequence[Any]) -> list[list[Any]]:
    """What the derivative of each segment's body keeps, in order of segments."""
    values = dict(zip(program.jaxpr.invars, inputs, strict=True))
    kept = []
    for cut in cuts.cuts:
        kept.append([])
        if cut.recompute and cut.body:
            body = program.cut(cut.body)
            results, pull = jax.vjp(_scoped(program, cut), *(values[v] for v in body.invars))
            values |= dict(zip(body.outvars, results, strict=True))
            kept[-1] = jax.tree.leaves(pull)
        for p in cut.tail if cut.recompute else cut.positions:
            _run(program, p, values)
    return kept


def _scoped(program: Program, cut: Cut) -> Callable[..., list[Any]]:
    """The body as a function in which every equation has a name scope of its own.

    Held values carry a mark, and whoever reads them reads them marked.
    """
    body = program.cut(cut.body)

    def run(*inputs: Any) -> list[Any]:
        values = dict(zip(body.invars, inputs, strict=True))
        for p in cut.body:
            with jax.named_scope(f"{_SCOPE}{p}"):
                _run(program, p, values)
            for var in program.eqns[p].outvars:
                if var in cut.held:
                    values[var] = bind_mark(values[var], _HELD, 0)
        return [values[var] for var in body.outvars]  # type: ignore[index]

    return run


def _run(program: Program, p: int, values: dict[Any, Any]) -> None:
    one = program.cut([p], program.eqns[p].outvars)
    results = evaluate(one)(*(values[var] for var in one.invars))
    values |= dict(zip(one.outvars, results, strict=True))


def _met(program: Program, cut: Cut, probe: Program, residuals: Sequence[Any]) -> tuple[int, ...]:
    """The body's equations on the way from its residuals back to its inputs."""
    if not cut.recompute:
        return ()
    first: dict[int, bool] = {}
    for i, live in enumerate(probe.live(residuals, given=_HELD)):
        scope = re.findall(rf"{_SCOPE}(\d+)", str(probe.eqns[i].source_info.name_stack))
        p = int(scope[-1]) if scope else None
        if p not in cut.body:
            continue
        whole = not inner_programs(program.eqns[p])
        if whole and primitive_name(probe.eqns[i]) != primitive_name(program.eqns[p]):
            continue
        # The value itself comes first in its scope; what its derivative adds comes behind. Of an
        # operator with a program inside, the derivative may need a part only: that counts too.
        first[p] = live if p not in first else first[p] or (live and not whole)
    return tuple(sorted(p for p, live in first.items() if live))
