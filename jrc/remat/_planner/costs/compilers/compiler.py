"""What the planner asks of a compiler, with the answers that most compilers share."""

import copy
from typing import Any, Literal

import jax

from jrc._jaxpr import Fusion, Program, facts_of, nbytes, primitive_name, reduced_axes
from jrc.remat._planner.costs.error_sizes import ErrorSizes

WithoutBarrier = Literal["none", "kernels", "chains"]
"""Which saved values stand behind no barrier: none; results of products and of reductions; or these
and what is elementwise and alone follows on them."""


class Compiler:
    """How the compiler of a platform lays out and fuses a program.

    Attributes:
        fuses_passes: Whether all that is elementwise is computed inside of whatever reads it.
        continues_products: Whether arithmetic that alone reads a product or a convolution is
            computed in its kernel, so that only the last result is written.
        reads_rows_twice: Whether one kernel reduces rows and goes over them once more, as in a
            softmax or a norm. To save what it reduces them to would split it.
        in_order: Whether a barrier keeps the gradients of weights in order. XLA for GPUs puts off
            the products that they are, and keeps the operands of all layers.
        makes_loops_early: Whether what loops write into is made, as zeros, before all else.
        most_in_turn: Regions that convolve run in at most so many chunks one after another in the
            program, and not in a loop, where convolutions are slow.
        peak_errors: How far off predicted temporaries are.
        time_errors: How far off predicted seconds are.
        recomputed_chunks: How many times as long as it is predicted a program takes that recomputes
            regions in chunks. In a transformer of 4 layers 1.3 to 1.8 times for an H100 and 1.2 for
            a v5e, over what else was predicted too low.
    """

    fuses_passes = True
    continues_products = False
    reads_rows_twice = True
    # XLA recomputes of its own accord in the baseline, so that its peak says nothing of others.
    peak_errors = ErrorSizes(0.2, 0.15, 0.3, 0.3, 0.02, 0.7, baseline_is_alike=False)
    time_errors = ErrorSizes(0.5, 0.03, 0.06, 0.51, 0.005, 0.97)
    in_order = False
    makes_loops_early = False
    most_in_turn = 0
    recomputed_chunks = 1.3

    def fuses(self, eqn: Any) -> bool:
        """Return whether what an equation makes is computed inside of whatever reads it.

        On accelerators that holds for all that is elementwise, and for a sum or a maximum along
        the last axis, as in a softmax or a norm. There a GPU's kernel reads a row, reduces it and
        goes over it once more (`softmax_rewriter_triton.cc` of XLA), and a TPU's computes it with
        the product that it is of. What is written to memory are results of products, of other
        reductions, of data that is gathered or sorted, and of loops.
        """
        facts = facts_of(eqn)
        if facts.fusion is Fusion.INSIDE or not self.fuses_passes:
            return facts.fusion is Fusion.INSIDE
        if facts.is_reduction and len(eqn.outvars) == 1:
            last = eqn.invars[0].aval.ndim - 1
            return last > 0 and reduced_axes(eqn) == (last,)
        return facts.fusion is Fusion.LOOP and not (facts.is_reduction or facts.is_cumulative)

    def is_pass(self, eqn: Any) -> bool:
        """Return whether an equation is a pass over data: it writes, and launches no kernel.

        On accelerators a concatenation is one: compilers compute it in the kernels of what is
        elementwise around it, as in the stencils of a solver.
        """
        if self.fuses_passes and primitive_name(eqn) == "concatenate":
            return True
        facts = facts_of(eqn)
        return facts.fusion is Fusion.LOOP and not facts.is_reduction

    def without_order(self) -> "Compiler":
        """Return this compiler, for a program on several devices.

        There gradients of weights are summed over devices while others are computed, which an order
        would forbid.
        """
        other = copy.copy(self)
        other.in_order = False
        return other

    @property
    def without_barrier(self) -> WithoutBarrier:
        """Which saved values stand behind no barrier: what kernels write, if readers are fused."""
        if not self.fuses_passes:
            return "none"
        return "chains" if self.continues_products else "kernels"

    def array_bytes(self, aval: Any) -> int:
        """Return the bytes of device memory that an array of this type occupies."""
        if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
            return 0
        return nbytes(aval)

    def value_bytes(self, program: Program, var: Any) -> int:
        """Return the bytes that a value occupies, which may depend on what reads it."""
        return self.array_bytes(var.aval)

    def moved_bytes(self, aval: Any) -> float:
        """Return the bytes that are read or written where an array is, as far as time goes."""
        return nbytes(aval)

    def fuses_derivative(self, eqn: Any) -> bool:
        """Return whether the derivative of a kernel of its own is none, but computed by readers."""
        return False

    def held_for_region(self, eqn: Any) -> int:
        """Return what lies in memory up to an equation's derivative where a region holds it."""
        return 0

    def held_table_bytes(self, aval: Any) -> float:
        """Return the bytes that are moved in the time that a region loses to a table it holds."""
        return 0

    def operand_bytes(self, program: Program, var: Any) -> int:
        """Return the bytes of a fused value that are written for a kernel of its own."""
        return self.array_bytes(var.aval)
