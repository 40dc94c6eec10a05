"""Name scopes that tell recomputed equations from those of the forward pass.

`jax.checkpoint` writes recomputed equations under a scope of its own. The builds of this package
that do not use `jax.checkpoint` write them under another one. A scope changes nothing but names.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jrc._jaxpr import primitive_name, scope_of

_SCOPE = "jrc_rerun"
_PLANNED = "jrc_plan"
_JAX_SCOPE = "rematted_computation"
_REGION = "RematTraced"
# The barrier in front of a recomputed region has the name of `jax.checkpoint`'s own primitive, or
# its own with `jax_remat3`. XLA gives it to collectives for the region's inputs: parameters that
# are gathered again.
_BARRIER = re.compile(r"transpose\(.*/(remat2|checkpoint|optimization_barrier)$")
# The derivative of a recomputed function is recomputation; its transpose is the backward pass.
_RERUN = re.compile(rf"(?<!transpose\(jvp\(){_SCOPE}")


@contextmanager
def rerun_scope() -> Iterator[None]:
    """Mark what is traced here as recomputation, inside a function that is differentiated."""
    with jax.named_scope(_SCOPE):
        yield


@contextmanager
def separate_rerun_scope() -> Iterator[None]:
    """Mark what is traced here as recomputation, in a backward pass, not differentiated itself."""
    # Enclosing transforms wrap the first name: the second stands alone.
    with jax.named_scope("again"), jax.named_scope(_SCOPE):
        yield


@contextmanager
def planned_scope() -> Iterator[None]:
    """Mark what is traced here as decided by a plan."""
    with jax.named_scope(_PLANNED):
        yield


def is_planned(eqn: Any) -> bool:
    """Return whether a plan decided what this equation saves."""
    return _PLANNED in scope_of(eqn)


def is_rerun(eqn: Any) -> bool:
    """Return whether this equation of a gradient recomputes something."""
    scope = scope_of(eqn)
    if _JAX_SCOPE in scope and (primitive_name(eqn) == _REGION or not _is_transposed(scope)):
        return True
    return bool(_RERUN.search(scope))


def is_rerun_path(path: str) -> bool:
    """Return the same for an operator of the compiled program, from its `op_name` path."""
    return _JAX_SCOPE in path or bool(_RERUN.search(path) or _BARRIER.search(path))


def is_backward_path(path: str) -> bool:
    """Return whether an operator of the compiled program belongs to the backward pass."""
    return "transpose(" in path


def _is_transposed(scope: str) -> bool:
    """With `jax_remat3` equations behind a region may carry its scope, transposed."""
    return f"transpose(jvp({_JAX_SCOPE}" in scope
