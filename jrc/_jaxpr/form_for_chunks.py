"""The form of a program in which most of its axes are independent: that in which chunks are found.

It computes the same. A region in chunks is one of this form, by the numbers of its equations.
"""

import weakref
from collections.abc import Collection

from jrc._jaxpr.early_slices import early_slices
from jrc._jaxpr.late_pads import late_pads
from jrc._jaxpr.picked_entries import with_entries_by_position
from jrc._jaxpr.program import Program
from jrc._jaxpr.reductions_in_steps import with_reductions_in_steps
from jrc._jaxpr.transposed_operands import with_operands_as_they_lie

_Forms = dict[frozenset[int], Program | None]

_FOUND: weakref.WeakKeyDictionary[Program, _Forms] = weakref.WeakKeyDictionary()
"""The forms by what is reduced in steps; `None` for the program itself, which would stay alive."""


def form_for_chunks(program: Program, in_steps: Collection[int] = ()) -> Program:
    """Return the program with early slices and late pads, and with no transposed operands.

    Args:
        program: The program, without `jit` calls.
        in_steps: The reductions that are made in two steps, of `reductions_over_several`.

    Returns:
        The program itself, where nothing changes.
    """
    key, found = frozenset(in_steps), _FOUND.setdefault(program, {})
    if key not in found:
        new = with_reductions_in_steps(with_operands_as_they_lie(program), key)
        new = late_pads(early_slices(with_entries_by_position(new)))
        found[key] = None if new is program else new
    return found[key] or program
