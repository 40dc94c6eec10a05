"""Telling what runs a second time from what runs once: by the name scope that it stands in.

`jax.checkpoint` writes what it runs again under a scope of its own; the builds of ours that do not
rest on it do the same with another one. A scope changes nothing but names.
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
# What is differentiated there runs again; its transpose is the backward pass proper.
_AGAIN = re.compile(rf"(?<!transpose\(jvp\(){_SCOPE}")


@contextmanager
def rerun_scope() -> Iterator[None]:
    """What is written here runs again, inside of a function that is being differentiated."""
    with jax.named_scope(_SCOPE):
        yield


@contextmanager
def separate_rerun_scope() -> Iterator[None]:
    """What is written here runs again, in a backward pass and not differentiated any more."""
    # The transforms around take the first name to themselves, so that the second stands alone.
    with jax.named_scope("again"), jax.named_scope(_SCOPE):
        yield


@contextmanager
def planned_scope() -> Iterator[None]:
    """What is written here was weighed by a plan."""
    with jax.named_scope(_PLANNED):
        yield


def is_planned(eqn: Any) -> bool:
    """Whether a plan decided what this equation keeps."""
    return _PLANNED in scope_of(eqn)


def is_rerun(eqn: Any) -> bool:
    """Whether this equation of a gradient runs something a second time."""
    scope = scope_of(eqn)
    if _JAX_SCOPE in scope and (primitive_name(eqn) == _REGION or not _is_transposed(scope)):
        return True
    return bool(_AGAIN.search(scope))


def is_rerun_path(path: str) -> bool:
    """The same of an operator of the compiled program, from the path that it was made under."""
    return _JAX_SCOPE in path or bool(_AGAIN.search(path))


def _is_transposed(scope: str) -> bool:
    """With `jax_remat3` what comes after the region's re-run may bear its name, transposed."""
    return f"transpose(jvp({_JAX_SCOPE}" in scope
