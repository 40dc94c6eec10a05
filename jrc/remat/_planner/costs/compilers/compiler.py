"""What the planner asks of a compiler, with the answers that most compilers share."""

from typing import Any

import jax

from jrc._jaxpr import Fusion, Program, facts_of, nbytes


class Compiler:
    """How the compiler of a platform lays out and fuses a program.

    Attributes:
        fuses_passes: Whether all that is elementwise is computed inside of whatever reads it.
        continues_products: Whether arithmetic that alone reads a product or a convolution is
            computed in its kernel, so that only the last result is written.
        model_error: How much larger compiled temporaries are than in the solver's model, before any
            are known: the logarithm of the factor, its mean over programs of `tests/zoo`.
        regions_in_chunks: How many times as long as it is predicted a program takes that has
            regions in chunks. In a transformer of 4 layers 1.3 to 1.6 times for an H100 and 1.2 for
            a v5e, over what else was predicted too low.
    """

    fuses_passes = True
    continues_products = False
    model_error = 0.0
    regions_in_chunks = 1.3

    def fuses(self, eqn: Any) -> bool:
        """Return whether what an equation makes is computed inside of whatever reads it.

        On accelerators that holds for all that is elementwise. What is written to memory are
        results of products, of reductions, of data that is gathered or sorted, and of loops.
        """
        facts = facts_of(eqn)
        if facts.fusion is Fusion.INSIDE or not self.fuses_passes:
            return facts.fusion is Fusion.INSIDE
        return facts.fusion is Fusion.LOOP and not (facts.is_reduction or facts.is_cumulative)

    def array_bytes(self, aval: Any) -> int:
        """Return the bytes of device memory that an array of this type occupies."""
        if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
            return 0
        return nbytes(aval)

    def fuses_derivative(self, eqn: Any) -> bool:
        """Return whether the derivative of a kernel of its own is none, but computed by readers."""
        return False

    def operand_bytes(self, program: Program, var: Any) -> int:
        """Return the bytes of a fused value that are written for a kernel of its own."""
        return self.array_bytes(var.aval)
