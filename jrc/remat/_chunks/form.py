"""The program that regions in chunks are of: a function's, or the body of a loop, in another form.

>>> import jax, jax.numpy as jnp
>>> fn = lambda h, E: (h @ E.T, jnp.max(h))
>>> program = Program(jax.make_jaxpr(fn)(jnp.ones((2, 3)), jnp.ones((5, 3))))
>>> form = Form(in_steps=(2,))
>>> [v.aval.shape for eqn in program_in_form(program, form).eqns[1:] for v in eqn.outvars]
[(2, 5), (2,), ()]
"""

from collections.abc import Collection
from typing import Any

from jrc._jaxpr import (
    Program,
    copy_for_readers,
    early_slices,
    form_for_chunks,
    reductions_over_several,
    with_reads_apart,
)
from jrc.remat._chunks.chunks import Form
from jrc.remat._chunks.numbering import copies_with_casts


def form_for(program: Program, differentiated: Collection[Any]) -> Form:
    """Return the form in which regions of a program are looked for first.

    Args:
        program: The program, without `jit` calls.
        differentiated: Values through which a derivative flows.
    """
    number = {p: k for k, p in enumerate(program.steps)}
    found = reductions_over_several(program, differentiated)
    return Form(tuple(number[p] for p in found if p in number))


def program_in_form(program: Program, form: Form) -> Program:
    """Return a program in a form.

    Args:
        program: The program, without `jit` calls.
        form: Its form.

    Raises:
        IndexError: If the program has no such equations.
    """
    new = form_for_chunks(program, [program.steps[k] for k in form.in_steps])
    if form.copies:
        # All readers of a copy may want one slice, where those of the original wanted several.
        new = early_slices(copy_for_readers(new, copies_with_casts(new, form.copies)))
    return with_reads_apart(new, [(new.steps[k], i) for k, i in form.apart])
