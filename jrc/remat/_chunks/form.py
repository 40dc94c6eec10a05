"""The program that regions in chunks are of.

>>> import jax, jax.numpy as jnp
>>> program = Program(jax.make_jaxpr(lambda h, E: h @ E.T)(jnp.ones((2, 3)), jnp.ones((5, 3))))
>>> [v.aval.shape for v in form_of(program, ends=[0]).eqns[-1].invars]
[(2, 3), (5, 3)]
"""

from collections.abc import Sequence

from jrc._jaxpr import Program, copy_for_readers, form_for_chunks
from jrc.remat._chunks.chunks import Chunks
from jrc.remat._chunks.numbering import copies_with_casts
from jrc.remat._gradient.activity import active_variables


def form_of(program: Program, ends: Sequence[int] | None) -> Program:
    """Return the form of a program in which regions are found.

    Args:
        program: The program, without `jit` calls.
        ends: Which of its results are differentiated; `None` where all values may be.
    """
    if ends is None:
        return form_for_chunks(program)
    results = [program.jaxpr.outvars[i] for i in ends]
    return form_for_chunks(program, active_variables(program, program.jaxpr.invars, results))


def form_with_copies(program: Program, chunks: Chunks) -> Program:
    """Return the form of a program that some chunks are of, with copies for readers.

    Args:
        program: The program, without `jit` calls.
        chunks: Chunks of it: all have the same copies.
    """
    program = form_of(program, chunks.ends)
    if not chunks.copies:
        return program
    return copy_for_readers(program, copies_with_casts(program, chunks.copies))
