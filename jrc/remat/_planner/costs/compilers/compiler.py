"""What the planner asks of a compiler, with the answers that most compilers share."""

from typing import Any

import jax

from jrc._jaxpr import Fusion, Program, facts_of, nbytes, primitive_name


class Compiler:
    """How the compiler of a platform lays out and fuses a program.

    Attributes:
        traces_gradients: Whether peaks are predicted from traced gradient programs, because the
            solver counts values that this compiler fuses away. The other attributes are asked for
            by that prediction alone.
        computes_operands: Whether a product or a convolution computes its operands while it reads
            what they are made from.
        continues_products: Whether arithmetic that alone reads a product or a convolution is
            computed in its kernel, so that only the last result is written.
        rounds_operands: Whether products of float32 read it as bfloat16, so that what they alone
            read is written as that.
        slices_early: Whether any slices of a value that a kernel writes are written right behind
            it, so that the rest of the value is gone; else only those that kernels read.
    """

    traces_gradients = True
    computes_operands = False
    continues_products = False
    rounds_operands = False
    slices_early = False

    def fuses(self, eqn: Any) -> bool:
        """Return whether what an equation makes is computed inside of whatever reads it.

        On accelerators that holds for all that is elementwise: what is written to memory are
        results of products, of reductions, of data that is gathered or sorted, and of loops.
        """
        facts = facts_of(eqn)
        is_pass = facts.fusion is Fusion.LOOP and not (facts.is_reduction or facts.is_cumulative)
        return facts.fusion is Fusion.INSIDE or is_pass or primitive_name(eqn) == "split"

    def array_bytes(self, aval: Any) -> int:
        """Return the bytes of device memory that an array of this type occupies."""
        if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
            return 0
        return nbytes(aval)

    def operand_bytes(self, program: Program, var: Any) -> int:
        """Return the bytes of a fused value that are written for a kernel of its own."""
        return self.array_bytes(var.aval)
