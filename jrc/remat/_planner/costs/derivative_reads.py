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
    is_ref,
    is_variable,
    parameters_of,
    primitive_name,
)
from jrc.remat._gradient.custom_rules import CUSTOM, forward_of
from jrc.remat._gradient.residuals import Stacked, residuals_of
from jrc.remat._planner.costs.constraints import hides_residuals
from jrc.remat._region.derivative_reads import derivative_reads


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What JAX said: positions of operands and of results, and what is saved inside.

    That is bytes, and what steps of loops write of it.
    """

    operands: frozenset[int]
    results: frozenset[int]
    bytes: int | None = None
    stacked: tuple[Stacked, ...] = ()


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the derivative of an equation needs.

    Attributes:
        variables: Those of its operands and results that it reads.
        inner_bytes: Bytes saved of programs inside; `None` for an equation that carries none.
        stacked: What of that steps of loops write.
    """

    variables: tuple[Any, ...] = ()
    inner_bytes: int | None = None
    stacked: tuple[Stacked, ...] = ()


_KNOWN: dict[Any, _Answer] = {}
"""What JAX said of equations with plain parameters, the last `_MOST_KNOWN` kinds."""
_MOST_KNOWN = 10_000


class DerivativeReads:
    """What derivatives read; equations of one kind share an answer."""

    def __init__(self) -> None:
        self._of_others: dict[Any, _Answer] = {}

    def of(self, program: Program, p: int, active: set[Any]) -> Needs:
        """Return what the derivative of equation `p` of a program needs."""
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
        return Needs((*operands, *results), known.bytes, known.stacked)


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
    if any(map(is_ref, given)):
        # JAX does not differentiate an equation alone that writes to a `Ref`.
        return _Answer(everything, results, 0 if hides_residuals(eqn) else None)
    if hides_residuals(eqn):
        if primitive_name(eqn) in CUSTOM:
            forward = forward_of(run, avals, perturbed)
            return _Answer(forward.operands, forward.results, forward.bytes, forward.stacked)
        inner = residuals_of(run, avals, perturbed)
        return _Answer(everything, frozenset(), inner.bytes, tuple(inner.stacked))
    try:
        return _Answer(*derivative_reads(run, avals, perturbed))
    except (NotImplementedError, TypeError, ValueError):
        return _Answer(everything, results)
