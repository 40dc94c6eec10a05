"""Going through a program: sub-programs, their kind, how often they run, where a line stands."""

import math
import os
import re
from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.extend.source_info_util import register_exclusion, summarize

# The line of a value is the user's, and not the one of ours that ran the user's program.
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UNKNOWN = "unknown"
"""The line of what no line of the user's made."""

for _room in ("_jaxpr", "remat"):
    register_exclusion(os.path.join(_HOME, _room) + os.sep)

# What a person calls the equations that carry a program of their own.
_KINDS = {
    "jit": "jax.jit",
    "scan": "lax.scan",
    "while": "lax.while_loop",
    "cond": "lax.cond",
    "custom_jvp_call": "a custom_jvp function",
    "custom_vjp_call": "a custom_vjp function",
    "remat2": "a jax.checkpoint region",
    "checkpoint": "a jax.checkpoint region",
    "RematTraced": "a jax.checkpoint region",
    "shard_map": "jax.shard_map",
}


def primitive_name(eqn: JaxprEqn) -> str:
    """The operator's name; the inner one where JAX wraps it (`jax_remat3`)."""
    inner = eqn.params.get("_prim")
    return eqn.primitive.name if inner is None else type(inner).__name__


def call_name(eqn: JaxprEqn) -> str | None:
    """The name of the function that a call is of: `silu` of a `jit`, `relu` of a custom rule."""
    if eqn.primitive.name == "jit":
        return eqn.params["name"]
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return eqn.params["call_jaxpr"].debug_info.func_name
    return None


def kind(eqn: JaxprEqn) -> str:
    """The construct of an equation with a program inside, in words: `lax.scan`."""
    name = primitive_name(eqn)
    return _KINDS.get(name, f"`{name}`")


def inner_programs(eqn: JaxprEqn) -> tuple[Jaxpr, ...]:
    """The programs that this equation carries, those that `jax_remat3` wraps included."""
    wrapped = getattr(eqn.params.get("_prim"), "params", {})
    return (*jaxprs_in_params(eqn.params), *jaxprs_in_params(wrapped))


def repeats(eqn: JaxprEqn) -> int:
    """How often the program inside runs: a scan's length, the cells of a Pallas grid, else 1.

    A `while` has no known count; nor has an axis of a grid whose size is not known before it runs.
    """
    name = eqn.primitive.name
    if name == "pallas_call":
        grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
        return math.prod(n for n in grid if isinstance(n, int))
    return eqn.params["length"] if name == "scan" else 1


def walk(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Every equation at every depth, with how often it runs; all branches of a `cond` count."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        for inner in inner_programs(eqn):
            yield from walk(inner, times * repeats(eqn))


def place(eqn: JaxprEqn) -> str:
    """The user's source line of an equation: `model.py:31`, or `UNKNOWN`."""
    found = re.match(r"(.*?):(\d+)", summarize(eqn.source_info))
    return f"{os.path.basename(found[1])}:{found[2]}" if found else UNKNOWN


def written_at(eqn: JaxprEqn) -> int:
    """A number for the moment at which an equation was first traced, which its copies keep."""
    return id(eqn.source_info.traceback)


def scope_of(eqn: JaxprEqn) -> str:
    """The names and transforms under which an equation was written: `transpose(jvp(net))/mlp`."""
    return str(eqn.source_info.name_stack)


def label(eqn: JaxprEqn) -> str:
    """An unmarked value for a person: `dot_general:(4,256)@model.py:31`."""
    if not eqn.outvars:
        return f"{primitive_name(eqn)}:@{place(eqn)}"
    shape = ",".join(str(n) for n in getattr(eqn.outvars[0].aval, "shape", ()))
    return f"{primitive_name(eqn)}:({shape})@{place(eqn)}"
