"""XLA's compiler for CPUs."""

import dataclasses
import math
from typing import Any

from jrc._jaxpr import Program, primitive_name, shape_of
from jrc.remat._planner.costs.compilers.compiler import Compiler
from jrc.remat._planner.costs.error_sizes import ErrorSizes


class _Cpu(Compiler):
    fuses_passes = False
    peak_errors = dataclasses.replace(Compiler.peak_errors, mean=0.1, mean_of_baseline=0.1)
    # Without regions the loops of weights' gradients go over the cotangents of all layers at once,
    # so that the baseline takes longer than is predicted where others do not.
    time_errors = ErrorSizes(
        0.3, 0.15, 0.15, 0.6, 0.02, 0.97, baseline_is_alike=False, mean=0.3, mean_of_baseline=0.3
    )
    recomputed_chunks = 1.0
    makes_loops_early = True
    most_in_turn = 16

    def held_for_region(self, eqn: Any) -> int:
        """Return what lies in memory up to an equation's derivative where a region holds it.

        XLA finds the place of a maximum over windows among the numbers of all entries, for each
        axis an array. They are made before all else. Outside of regions the places are found in
        the forward pass.
        """
        if primitive_name(eqn) not in ("reduce_window_max", "reduce_window_min"):
            return 0
        shape = shape_of(eqn.invars[0])
        return 4 * len(shape) * math.prod(shape)

    def operand_bytes(self, program: Program, var: Any) -> int:
        """Return the bytes of a fused value that are written for a kernel of its own.

        A product, a convolution or a sum is a call of a library. What was broadcast for it lies
        there once more.
        """
        eqn = program.eqns[program.producer[var]]
        shapes = (getattr(x.aval, "shape", ()) for x in eqn.invars)
        size = math.prod(var.aval.shape)
        is_broadcast = any(shape and math.prod(shape) < size for shape in shapes)
        return self.array_bytes(var.aval) * (2 if is_broadcast else 1)


CPU = _Cpu()
