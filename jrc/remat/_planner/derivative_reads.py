"""What derivatives read. No table says it: JAX is asked, once for each kind of equation."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._jaxpr import (
    INPUT,
    Program,
    evaluate,
    inline_all,
    inner_programs,
    is_variable,
    nbytes,
    primitive_name,
)
from jrc.remat._planner.equation_kinds import is_construct, is_heavy
from jrc.remat._region.derivative_reads import derivative_reads


class DerivativeReads:
    """What derivatives read, asked once for each kind of equation."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[frozenset[int], frozenset[int], int | None]] = {}

    def of(self, program: Program, p: int, active: set[Any]) -> tuple[list[Any], int | None]:
        """The variables that the derivative of equation `p` reads; bytes that it keeps inside."""
        eqn, given = program.eqns[p], program.reads(p)
        perturbed = [i for i, v in enumerate(given) if v in active]
        key = _kind(eqn, given, perturbed)
        if key not in self._known:
            self._known[key] = _asked(program, p, perturbed)
        inputs, results, inner_bytes = self._known[key]
        derivative_reads = [v for i, v in enumerate(given) if i in inputs]
        return derivative_reads + [
            v for i, v in enumerate(eqn.outvars) if i in results
        ], inner_bytes


def _kind(eqn: Any, given: Sequence[Any], perturbed: Sequence[int]) -> Any:
    at = tuple(given.index(x) if is_variable(x) else repr(x.val) for x in eqn.invars)
    avals = tuple(str(x.aval) for x in (*eqn.invars, *eqn.outvars))
    inner = inner_programs(eqn)
    params = id(eqn) if inner else repr(sorted(eqn.params.items(), key=lambda item: item[0]))
    return primitive_name(eqn), avals, at, tuple(perturbed), params


def _asked(program: Program, p: int, perturbed: Sequence[int]) -> Any:
    eqn, given = program.eqns[p], program.reads(p)
    run = evaluate(program.cut([p], eqn.outvars))
    avals = [v.aval for v in given]
    everything = frozenset(range(len(given)))
    if any(map(_is_ref, avals)):
        # JAX does not differentiate what writes to a `Ref` on its own.
        return everything, frozenset(range(len(eqn.outvars))), 0 if is_construct(eqn) else None
    if is_construct(eqn):
        return everything, frozenset(), residuals_of(run, avals, perturbed).bytes
    try:
        return *derivative_reads(run, avals, perturbed), None
    except (NotImplementedError, TypeError, ValueError):
        return everything, frozenset(range(len(eqn.outvars))), None


def _is_ref(aval: Any) -> bool:
    return hasattr(aval, "inner_aval")


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the derivative of a function keeps besides its inputs.

    Attributes:
        jaxpr: The program that makes it; its results are all that the derivative keeps.
        kept: Those results that are no inputs.
    """

    jaxpr: Any
    kept: frozenset[Any]

    @property
    def bytes(self) -> int:
        """What they take."""
        return sum(nbytes(x.aval) for x in self.kept)

    @property
    def unfusable_bytes(self) -> int:
        """Bytes of results of products and the like, from which all of them can be made.

        The rest XLA may make again of its own accord, fused with what reads it.
        """
        program = Program(inline_all(self.jaxpr))
        both = zip(program.jaxpr.outvars, self.jaxpr.outvars, strict=True)
        wanted = [x for x, old in both if is_variable(old) and old in self.kept]
        seen, unfusable_bytes = set(), 0
        while wanted:
            var = wanted.pop()
            p = program.producer[var] if is_variable(var) else INPUT
            if p == INPUT or var in seen:
                continue
            seen.add(var)
            if is_heavy(program.eqns[p]):
                unfusable_bytes += nbytes(var.aval)
            else:
                wanted += program.reads(p)
        return unfusable_bytes


def residuals_of(
    run: Callable[..., Any], avals: Sequence[Any], perturbed: Sequence[int]
) -> Residuals:
    """What the derivative of a function keeps when these inputs move; JAX is asked."""

    def kept(*inputs: Any) -> Any:
        def at(*active_variables: Any) -> Any:
            new = dict(zip(perturbed, active_variables, strict=True))
            return list(run(*(new.get(i, x) for i, x in enumerate(inputs))))

        return jax.tree.leaves(jax.vjp(at, *(inputs[i] for i in perturbed))[1])

    jaxpr = jax.make_jaxpr(kept)(*avals)
    given = {*jaxpr.constvars, *jaxpr.invars}
    made = (x for x in jaxpr.outvars if is_variable(x) and x not in given)
    return Residuals(jaxpr, frozenset(made))
