"""What derivatives read. JAX is asked, once for each kind of equation.

A search looks at a dozen programs that are alike but for some regions in chunks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import (
    Program,
    evaluate,
    inner_programs,
    is_plain,
    is_variable,
    parameters_of,
    primitive_name,
)
from jrc.remat._gradient.custom_rules import CUSTOM, forward_of
from jrc.remat._gradient.residuals import residuals_of
from jrc.remat._planner.costs.constraints import hides_residuals
from jrc.remat._region.derivative_reads import derivative_reads


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What JAX said: positions of operands and of results, and bytes saved inside."""

    operands: frozenset[int]
    results: frozenset[int]
    bytes: int | None = None


_KNOWN: dict[Any, _Answer] = {}
"""What JAX said of equations with plain parameters, the last `_MOST_KNOWN` kinds."""
_MOST_KNOWN = 10_000


class DerivativeReads:
    """What derivatives read; equations of one kind share an answer."""

    def __init__(self) -> None:
        self._of_others: dict[Any, _Answer] = {}

    def of(self, program: Program, p: int, active: set[Any]) -> tuple[list[Any], int | None]:
        """Return the variables that the derivative of equation `p` reads, and its inner residuals.

        These are bytes saved of programs inside, `None` for an equation that carries none.
        """
        eqn, given = program.eqns[p], program.reads(p)
        perturbed = [i for i, v in enumerate(given) if v in active]
        key = _kind(eqn, given, perturbed)
        answers = _KNOWN if is_plain(eqn) else self._of_others
        if key not in answers:
            answers[key] = _ask_jax(program, p, perturbed)
            if len(_KNOWN) > _MOST_KNOWN:
                del _KNOWN[next(iter(_KNOWN))]
        known = answers[key]
        operands = [v for i, v in enumerate(given) if i in known.operands]
        results = [v for i, v in enumerate(eqn.outvars) if i in known.results]
        return operands + results, known.bytes


def _kind(eqn: Any, given: Sequence[Any], perturbed: Sequence[int]) -> Any:
    at = tuple(given.index(x) if is_variable(x) else repr(x.val) for x in eqn.invars)
    avals = tuple(str(x.aval) for x in (*eqn.invars, *eqn.outvars))
    inner = inner_programs(eqn)
    parameters = id(eqn) if inner else repr(parameters_of(eqn))
    return eqn.primitive, avals, at, tuple(perturbed), parameters


def _ask_jax(program: Program, p: int, perturbed: Sequence[int]) -> _Answer:
    eqn, given = program.eqns[p], program.reads(p)
    run = evaluate(program.cut([p], eqn.outvars))
    avals = [v.aval for v in given]
    everything, results = frozenset(range(len(given))), frozenset(range(len(eqn.outvars)))
    if any(map(_is_ref, avals)):
        # JAX does not differentiate an equation alone that writes to a `Ref`.
        return _Answer(everything, results, 0 if hides_residuals(eqn) else None)
    if hides_residuals(eqn):
        if primitive_name(eqn) in CUSTOM:
            forward = forward_of(run, avals, perturbed)
            return _Answer(forward.operands, forward.results, forward.bytes)
        return _Answer(everything, frozenset(), residuals_of(run, avals, perturbed).bytes)
    try:
        return _Answer(*derivative_reads(run, avals, perturbed))
    except (NotImplementedError, TypeError, ValueError):
        return _Answer(everything, results)


def _is_ref(aval: Any) -> bool:
    return hasattr(aval, "inner_aval")
