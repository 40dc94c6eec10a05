"""The program that regions and plans are made for: without calls, with copies of cheap values."""

import weakref
from typing import Any

from jrc._jaxpr.array_constants import with_array_constants
from jrc._jaxpr.batched_indices import with_batched_indices
from jrc._jaxpr.inline import inline_marked
from jrc._jaxpr.program import Program
from jrc._jaxpr.unshare import unshared
from jrc._jaxpr.varying_casts import folded

_INLINED: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


def inlined_program(jaxpr: Any) -> Program:
    """Return a program without `jit` calls, and with copies of cheap values that are shared.

    Numbers have the type that they are cast to, rows that an index counts are its batch, and
    arrays are no literals. The programs inside of loops are asked for again and again: each is made
    once.
    """
    found = _INLINED.get(jaxpr)
    if found is None:
        inlined = inline_marked(jaxpr, lambda _: True)
        found = unshared(Program(with_array_constants(with_batched_indices(folded(inlined)))))
        if found.jaxpr is not jaxpr:  # else the entry would keep its own key alive
            _INLINED[jaxpr] = found
    return found
