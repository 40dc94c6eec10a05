"""The report of a function as it is, not of its gradient: what its compiled program needs."""

import collections
from collections.abc import Callable
from typing import Any

import jax

from jrc._errors import name_of
from jrc._jaxpr import flops, inner_programs, is_variable, nbytes, place, primitive_name, walk
from jrc._targets import Target, abstract_on, chip_of_device, compiler_versions
from jrc._tree import is_traced, split
from jrc.remat._compiled.collectives import collectives
from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._gradient.arguments import refuse_tracers
from jrc.remat._gradient.compiled_memory import (
    bytes_on_device,
    compiled_to_look_at,
    device_of,
    memory_of,
)
from jrc.remat._gradient.saved_values import SavedValue
from jrc.remat._report.report import Report
from jrc.remat._time.seconds import known_device, seconds_on

_LARGEST = 50
"""So many of the largest values are in a report."""


def explained_as_it_is(
    fn: Callable[..., Any], args: tuple[Any, ...], there: Target | None
) -> Report:
    """Return the report of a function, as `jrc.explain(..., argnums=None)` does.

    Args:
        fn: A function; one with a method `lower`, as `jax.jit` returns it, is lowered by that.
        args: Its arguments.
        there: What it is compiled for.
    """
    if not callable(fn) or isinstance(fn, jax.stages.Compiled):
        raise TypeError(
            f"fn must be a function, got {type(fn).__name__}. Pass the function itself, as it is "
            "or under jax.jit."
        )
    refuse_tracers(args)
    args = abstract_on(there, args) if there else args
    lowered, jaxpr = _lowered(fn, args)
    arrays = [leaf for leaf in jax.tree.leaves(args) if is_traced(leaf)]
    device = device_of(arrays)
    compiled = compiled_to_look_at(lowered, device.platform)
    memory, module = memory_of(compiled), parse_hlo(compiled.as_text())
    chip = there.chip if there else chip_of_device(device)
    known = known_device(device.platform, chip)
    meshes = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in arrays)
    mesh = next((mesh.shape for mesh in meshes if mesh is not None), {})
    return Report(
        name=name_of(fn),
        saved=_largest_values(jaxpr.jaxpr) if jaxpr else (),
        rerun=(),
        flops=flops(jaxpr.jaxpr) if jaxpr else 0,
        memory=memory,
        live=(),
        collectives=collectives(module, mesh),
        warnings=(),
        device=there.name if there else device.device_kind,
        time=seconds_on(module, known, memory.temporaries) if known else None,
        is_gradient=False,
        constants=sum(map(bytes_on_device, jaxpr.consts)) if jaxpr else 0,
        donatable=_donatable(lowered),
        versions=versions(),
    )


def versions() -> tuple[str, ...]:
    """Return JAX and the compilers that are installed, with their versions."""
    return tuple(f"{name} {version}" for name, version in compiler_versions().items())


def _lowered(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[jax.stages.Lowered, Any]:
    """The function, lowered; and its program, where that can be had."""
    if hasattr(fn, "trace"):
        traced = fn.trace(*args)
        return traced.lower(), traced.jaxpr
    if hasattr(fn, "lower"):
        return fn.lower(*args), None
    arrays, skeleton = split(args)

    def run(*given: Any) -> list[Any]:
        return split(fn(*skeleton.fill(given)))[0]

    traced = jax.jit(run).trace(*arrays)
    return traced.lower(), traced.jaxpr


def _largest_values(jaxpr: Any) -> tuple[SavedValue, ...]:
    """The largest values that equations make, equal ones of a line together."""
    found: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for eqn, _ in walk(jaxpr):
        for v in eqn.outvars:
            if is_variable(v) and not inner_programs(eqn):
                aval: Any = v.aval
                found[
                    aval.shape, str(aval.dtype), nbytes(aval), primitive_name(eqn), place(eqn)
                ] += 1
    values = [
        SavedValue(count * size, shape, dtype, operator, None, line, count, ())
        for (shape, dtype, size, operator, line), count in found.items()
    ]
    return tuple(sorted(values, key=lambda each: -each.bytes // each.times)[:_LARGEST])


def _donatable(lowered: jax.stages.Lowered) -> int:
    """Bytes of results that could lie in the memory of arguments of their type, and do not."""
    key = lambda x: (tuple(x.shape), str(x.dtype), nbytes(x))  # noqa: E731
    infos = jax.tree.leaves(lowered.args_info)
    given, donated = (
        collections.Counter(key(each) for each in infos if each.donated == is_donated)
        for is_donated in (False, True)
    )
    made = collections.Counter(map(key, jax.tree.leaves(lowered.out_info)))
    left = (made - donated) & given
    return sum(count * size for (_, _, size), count in left.items())
