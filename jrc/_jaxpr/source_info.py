"""Where an equation comes from: the user's source line, and the name scope around it."""

import functools
import os
import re
import types
from typing import Any

from jax.extend.core import JaxprEqn
from jax.extend.source_info_util import register_exclusion, summarize

from jrc._jaxpr.primitives import primitive_name

UNKNOWN = "unknown"
"""The source line of an equation that comes from no line of the user's code."""

# JAX attributes a line to the innermost frame outside of these, which run user code.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = re.compile(
    rf"[\\/](site|dist)-packages[\\/]|^{re.escape(_PACKAGE)}|^{re.escape(os.path.dirname(os.__file__))}"
)
for _place in (f"_jaxpr{os.sep}", f"cli{os.sep}", f"remat{os.sep}", "_errors.py"):
    register_exclusion(os.path.join(_PACKAGE, _place))


def place(eqn: JaxprEqn) -> str:
    """Return the user's source line of an equation: `model.py:31`, or `UNKNOWN`."""
    return _first_place(eqn.source_info.traceback)


@functools.lru_cache(maxsize=2**15)  # programs are inlined again and again
def _first_place(traceback: Any) -> str:
    source_info: Any = types.SimpleNamespace(traceback=traceback)  # all that `summarize` reads
    found = re.match(r"(.*?):(\d+)", summarize(source_info))
    return f"{os.path.basename(found[1])}:{found[2]}" if found else UNKNOWN


def own_place(eqn: JaxprEqn) -> str:
    """Return the innermost source line that is of no installed package: the user's own.

    It is `UNKNOWN` where there is none.
    """
    frames = getattr(eqn.source_info.traceback, "frames", ())
    own = (each for each in frames if not _INSTALLED.search(each.file_name))
    found = next(own, None)
    return f"{os.path.basename(found.file_name)}:{found.line_num}" if found else UNKNOWN


def trace_id(eqn: JaxprEqn) -> int:
    """Return a number for the moment at which an equation was traced; its copies keep it."""
    return id(eqn.source_info.traceback)


def scope_of(eqn: JaxprEqn) -> str:
    """Return the names and transforms around an equation: `transpose(jvp(net))/mlp`."""
    return str(eqn.source_info.name_stack)


def label(eqn: JaxprEqn) -> str:
    """Return a name for an unmarked value: `dot_general:(4,256)@model.py:31`."""
    if not eqn.outvars:
        return f"{primitive_name(eqn)}:@{place(eqn)}"
    shape = ",".join(str(n) for n in getattr(eqn.outvars[0].aval, "shape", ()))
    return f"{primitive_name(eqn)}:({shape})@{place(eqn)}"
