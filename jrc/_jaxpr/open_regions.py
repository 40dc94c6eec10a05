"""Opening `jax.checkpoint` regions: their equations are written in place of them.

A region that a user wrote is a suggestion. The planner sees what is inside, at any depth: in loops,
in branches, in the parts of a `shard_map`, in `jit` calls. What a policy saves by name keeps its
name as a mark.

>>> import jax, jax.numpy as jnp
>>> block = jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))
>>> opened = open_regions(jax.make_jaxpr(block)(1.0))
>>> [eqn.primitive.name for eqn in opened.jaxpr.eqns], opened.count
(['cos', 'sin'], 1)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Var

from jrc._jaxpr.atoms import is_variable, substitute
from jrc._jaxpr.control_flow import can_rebuild
from jrc._jaxpr.equations import has_barrier, inner_programs, is_differentiated_region
from jrc._jaxpr.inline import inline_marked, source_inside, splice
from jrc._jaxpr.mark import mark_of
from jrc._jaxpr.op_tag import tag_of
from jrc._jaxpr.primitives import facts_of


@dataclasses.dataclass(frozen=True, eq=False)
class Opened:
    """A program without regions.

    Attributes:
        jaxpr: The program; the same object if it has no region.
        count: How many regions were opened.
        inside: The variables that were made in a region and did not leave it, at any depth.
        leaving: Those that were made in a region, and left all regions around it.
    """

    jaxpr: Jaxpr
    count: int
    inside: frozenset[Any] = frozenset()
    leaving: frozenset[Any] = frozenset()


def open_regions(jaxpr: Jaxpr, is_dropped: Callable[[str], bool] = lambda _: False) -> Opened:
    """Return a program with the equations of its `jax.checkpoint` regions in place of them.

    A region of a backward pass stays: it is differentiated already, and is recomputed there. So do
    regions inside of custom derivatives, `while` loops and tagged calls.

    Args:
        jaxpr: The program.
        is_dropped: Of a name that a region saves, whether it is dropped from a program with
            regions; others stay as marks.
    """
    count = sum(_regions_in(eqn, _is_opened) for eqn in jaxpr.eqns)
    if not count:
        return Opened(jaxpr, 0)
    opener = _Opener(is_dropped, _is_opened, _as_they_are, set(), set())
    opened = opener.opened(jaxpr, False)
    return Opened(opened, count, frozenset(opener.inside), frozenset(opener.leaving))


def backward_regions_opened(jaxpr: Jaxpr) -> Jaxpr:
    """Return a program with the equations of the regions of backward passes, behind barriers.

    Where a gradient is taken of a program with such a region, as the rule of a custom derivative
    has one, JAX writes out what the region computes without its barrier. XLA would then merge the
    recomputation with the first computation, and keep all that is saved without regions.
    """
    if not any(_regions_in(eqn, has_barrier) for eqn in jaxpr.eqns):
        return jaxpr
    opener = _Opener(lambda _: False, has_barrier, _behind_a_barrier, set(), set())
    return opener.opened(jaxpr, False)


def _as_they_are(atoms: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    return [], atoms


def _behind_a_barrier(atoms: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    """The equation of a barrier, and the atoms behind it."""
    passed: list[Any] = list(dict.fromkeys(filter(is_variable, atoms)))
    if not passed:
        return [], atoms
    behind = {v: Var(v.aval) for v in passed}
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.optimization_barrier([x]))(1.0).eqns
    eqn = eqn.replace(invars=passed, outvars=[behind[v] for v in passed])
    return [eqn], [behind[x] if is_variable(x) else x for x in atoms]


def _regions_in(eqn: Any, is_opened: Callable[[Any], bool]) -> int:
    """How many regions that are opened an equation is or has inside."""
    inside = inner_programs(eqn) if is_opened(eqn) or _is_entered(eqn) else ()
    more = (_regions_in(each, is_opened) for jaxpr in inside for each in jaxpr.eqns)
    return is_opened(eqn) + sum(more)


def _is_opened(eqn: Any) -> bool:
    return facts_of(eqn).is_region and not is_differentiated_region(eqn)


def _is_entered(eqn: Any) -> bool:
    return can_rebuild(eqn) and tag_of(eqn) is None


@dataclasses.dataclass(frozen=True)
class _Opener:
    is_dropped: Callable[[str], bool]
    is_opened: Callable[[Any], bool]
    passing: Callable[[Sequence[Any]], tuple[list[Any], Sequence[Any]]]
    inside: set[Any]
    leaving: set[Any]

    def opened(self, jaxpr: Jaxpr, within: bool) -> Jaxpr:
        """The program without regions and `jit` calls; `within` where it lies in a region."""
        renamed: dict[Any, Any] = {}
        eqns: list[Any] = []
        # Calls are inlined first, because that gives new variables to what is inside of them.
        jaxpr = inline_marked(jaxpr, lambda _: True)
        for eqn in jaxpr.eqns:
            eqn = eqn.replace(invars=substitute(eqn.invars, renamed))
            mark = mark_of(eqn)
            if self.is_opened(eqn):
                eqns += self._in_place(eqn, renamed, within)
            elif mark and self.is_dropped(mark[0]):
                renamed[eqn.outvars[0]] = eqn.invars[0]
            else:
                eqns.append(self._entered(eqn, within) if _is_entered(eqn) else eqn)
                self.inside.update(eqn.outvars if within else ())
        return jaxpr.replace(eqns=eqns, outvars=substitute(jaxpr.outvars, renamed))

    def _in_place(self, eqn: Any, renamed: dict[Any, Any], within: bool) -> list[Any]:
        """The equations of a region."""
        (inner,) = inner_programs(eqn)
        passing, atoms = self.passing(eqn.invars)
        more, results = splice(self.opened(inner, True), atoms)
        more = [*passing, *more]
        renamed |= dict(zip(eqn.outvars, results, strict=True))
        made = {v for each in more for v in each.outvars}
        leaving = set() if within else made.intersection(filter(is_variable, results))
        self.inside.update(made - leaving)
        self.leaving.update(leaving)
        return [each.replace(source_info=source_inside(eqn, each)) for each in more]

    def _entered(self, eqn: Any, within: bool) -> Any:
        """A loop, a branch or the like with an opened program inside."""

        def opened(param: Any) -> Any:
            if isinstance(param, Jaxpr):
                return self.opened(param, within)
            if isinstance(param, tuple) and param and all(isinstance(x, Jaxpr) for x in param):
                return tuple(map(opened, param))
            return param

        return eqn.replace(params={key: opened(x) for key, x in eqn.params.items()})
