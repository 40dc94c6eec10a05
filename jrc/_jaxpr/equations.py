"""One equation, and the programs inside of it: how to reach them and how often they run."""

import enum
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import NamedSharding

from jrc._jaxpr.primitives import facts_of, primitive_name

_IN_KERNELS = {"mosaic"}
"""Platforms that the inside of a Pallas kernel is compiled for."""


def call_name(eqn: JaxprEqn) -> str | None:
    """Return the function that an equation calls: `silu` of a `jit`, `relu` of a custom rule."""
    if eqn.primitive.name == "jit":
        return eqn.params["name"]
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return eqn.params["call_jaxpr"].debug_info.func_name
    return None


def construct_name(eqn: JaxprEqn) -> str:
    """Return what a user calls an equation with a program inside: `lax.scan`."""
    return facts_of(eqn).construct or f"`{primitive_name(eqn)}`"


def inner_programs(eqn: JaxprEqn) -> tuple[Jaxpr, ...]:
    """Return the programs that an equation carries, those that `jax_remat3` wraps included.

    Those of a `cond` are its branches, in order.
    """
    wrapped = getattr(eqn.params.get("_prim"), "params", {})
    return (*jaxprs_in_params(eqn.params), *jaxprs_in_params(wrapped))


def inner_program(eqn: JaxprEqn) -> Jaxpr:
    """Return the one program that an equation carries: what a `jit` calls, or a `scan` repeats."""
    (program,) = inner_programs(eqn)
    return program


def branch_outside_kernels(eqn: JaxprEqn) -> int | None:
    """Return which branch of a `cond` runs wherever the program is no Pallas kernel.

    `jnp.diagonal` is such a `cond`: one of its branches is for a kernel on a TPU, and never
    compiled elsewhere. `None` if several branches may run, or for any other equation.
    """
    platforms = eqn.params.get("branches_platforms") or ()
    others = [each for each in platforms if each is not None]
    if len(others) + 1 != len(platforms) or not all(set(each) <= _IN_KERNELS for each in others):
        return None
    return list(platforms).index(None)


def policy_in(eqn: JaxprEqn) -> Any:
    """Return the policy of a `jax.checkpoint` region, one that `jax_remat3` wraps included."""
    return getattr(eqn.params.get("_prim"), "policy", None) or eqn.params.get("policy")


def region_around(eqn: JaxprEqn, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function under a `jax.checkpoint` like that of a region."""
    here: Any = eqn.params.get("prevent_cse")
    of_region = getattr(eqn.params.get("_prim"), "prevent_cse", here)
    return jax.checkpoint(run, policy=policy_in(eqn), prevent_cse=of_region)


def sharding_of(eqn: JaxprEqn) -> NamedSharding | None:
    """Return the sharding on a mesh that a constraint gives to its result; else `None`."""
    found = eqn.params.get("sharding") if primitive_name(eqn) == "sharding_constraint" else None
    return found if isinstance(found, NamedSharding) else None


def policy_answer(policy: Callable[..., Any], eqn: JaxprEqn) -> Any:
    """Return what a policy of `jax.checkpoint` decides for an equation, in JAX's form."""
    return policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)


def is_differentiated_region(eqn: JaxprEqn) -> bool:
    """Return whether this is a `jax.checkpoint` region of a backward pass.

    With `jax_remat3` a backward pass has none in this form.
    """
    return facts_of(eqn).is_region and bool(eqn.params.get("differentiated"))


def has_barrier(eqn: JaxprEqn) -> bool:
    """Return whether a region of a backward pass reads its inputs behind a barrier.

    It does unless `prevent_cse=False`: what it recomputes is not merged with what ran before.
    """
    return is_differentiated_region(eqn) and bool(eqn.params.get("prevent_cse"))


def repeats(eqn: JaxprEqn) -> int:
    """Return how often the program inside runs: a scan's length, the cells of a Pallas grid, or 1.

    The count of a `while`, and an axis of a grid whose size is a traced value, is not known and
    counts as 1.
    """
    name = eqn.primitive.name
    if name == "pallas_call":
        grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
        return math.prod(n for n in grid if isinstance(n, int))
    return eqn.params["length"] if name == "scan" else 1


def has_default_precision(eqn: JaxprEqn) -> bool:
    """Return whether no precision is asked for of a product or a convolution.

    >>> highest = jax.lax.Precision.HIGHEST
    >>> run = lambda x: x @ jax.numpy.matmul(x, x, precision=highest)
    >>> [has_default_precision(eqn) for eqn in jax.make_jaxpr(run)(np.ones((2, 2), "f")).eqns]
    [False, True]
    """
    precision = eqn.params.get("precision")
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(each in (None, jax.lax.Precision.DEFAULT) for each in both)


def exponent_of(eqn: JaxprEqn) -> int | None:
    """Return the exponent of an `integer_pow`, `None` for any other equation."""
    return eqn.params["y"] if eqn.primitive.name == "integer_pow" else None


def parameters_of(eqn: JaxprEqn) -> tuple[tuple[str, Any], ...]:
    """Return all parameters of an equation, sorted by name, as (name, value).

    With the primitive and the inputs they decide what an equation computes. One of them alone has
    a function with its name, here or beside.
    """
    return tuple(sorted(eqn.params.items(), key=lambda item: item[0]))


def is_plain(eqn: JaxprEqn) -> bool:
    """Return whether the text of an equation's parameters says all of them: numbers, names, types.

    Functions, programs and objects of a library are not said by their texts.
    """
    return all(map(_is_plain, eqn.params.values()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, enum.Enum, np.dtype))


def walk(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Yield the equations at every depth with how often each runs; all branches of a `cond` too."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        for inner in inner_programs(eqn):
            yield from walk(inner, times * repeats(eqn))


def has_effects(eqn: JaxprEqn) -> bool:
    """Return whether an equation does more than make its results; naming an axis is no effect."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
