"""XLA's compiler for GPUs."""

from typing import Any

from jrc._jaxpr import facts_of, reduced_axes
from jrc.remat._planner.costs.compilers.compiler import Compiler


class _Gpu(Compiler):
    def fuses(self, eqn: Any) -> bool:
        """Return whether what an equation makes is computed inside of whatever reads it.

        So is a sum or a maximum along the last axis, as in a softmax or a norm: one kernel reads a
        row, reduces it and goes over it once more. To save its result would cut that kernel in two.

        Source: `softmax_rewriter_triton.cc` of XLA.
        """
        if super().fuses(eqn):
            return True
        facts = facts_of(eqn)
        if not (facts.is_reduction and len(eqn.outvars) == 1):
            return False
        last = eqn.invars[0].aval.ndim - 1
        return last > 0 and reduced_axes(eqn) == (last,)


GPU = _Gpu()
