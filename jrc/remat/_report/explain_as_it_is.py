"""The report of a function as it is, not of its gradient: what its compiled program needs."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jrc._errors import name_of
from jrc._jaxpr import flops, inner_programs, is_variable, nbytes, place, primitive_name, walk
from jrc._targets import Target, abstract_on, compiler_versions
from jrc._text import memory_text
from jrc._tree import is_traced
from jrc.remat._compiled.collectives import collectives
from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._gradient.arguments import refuse_tracers
from jrc.remat._gradient.compiled_memory import (
    Memory,
    bytes_on_device,
    compiled_with_memory,
    device_of,
)
from jrc.remat._gradient.saved_values import SavedValue
from jrc.remat._report.buffer_liveness import donated_results
from jrc.remat._report.compiled_schedule import live_points
from jrc.remat._report.donation import donatable
from jrc.remat._report.lowered_function import lowered_function
from jrc.remat._report.report import Report
from jrc.remat._report.tried_remedies import tried_donation
from jrc.remat._time.seconds import device_with_rates, seconds_on

_LARGEST = 50
"""So many of the largest values are in a report."""


def explained_as_it_is(
    fn: Callable[..., Any], args: tuple[Any, ...], there: Target | None, try_donation: bool
) -> Report:
    """Return the report of a function, as `jrc.explain(..., argnums=None)` does.

    Args:
        fn: A function; one with a method `lower`, as `jax.jit` returns it, is lowered by that.
        args: Its arguments.
        there: What it is compiled for.
        try_donation: Whether it is compiled with arguments donated too, where any could be.
    """
    if not callable(fn) or isinstance(fn, jax.stages.Compiled):
        raise TypeError(
            f"fn must be a function, got {type(fn).__name__}. Pass the function itself, as it is "
            "or under jax.jit."
        )
    refuse_tracers(args)
    given, args = args, abstract_on(there, args) if there else args
    lowered, jaxpr = lowered_function(fn, args)
    arrays = [leaf for leaf in jax.tree.leaves(args) if is_traced(leaf)]
    device = device_of(arrays)
    memory, compiled = compiled_with_memory(
        lowered, device.platform, sum(map(bytes_on_device, arrays))
    )
    text = compiled.as_text() if compiled else ""
    module = parse_hlo(text) if compiled else None
    known = device_with_rates(there, device)
    size, argnums = donatable(lowered, compiled, given)
    meshes = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in arrays)
    mesh = next((mesh.shape for mesh in meshes if mesh is not None), {})
    report = Report(
        name=name_of(fn),
        saved=_largest_values(jaxpr.jaxpr) if jaxpr else (),
        rerun=(),
        flops=flops(jaxpr.jaxpr) if jaxpr else 0,
        memory=memory,
        live=live_points(module, donated=donated_results(text)) if module else (),
        collectives=collectives(module, mesh) if module else (),
        warnings=() if module else (refused_text(memory, "jrc.plan of its loss makes it fit"),),
        device=there.name if there else device.device_kind,
        time=seconds_on(module, known, memory.temporaries) if module and known else None,
        is_gradient=False,
        constants=sum(map(bytes_on_device, jaxpr.consts)) if jaxpr else 0,
        donatable=size,
        donatable_argnums=argnums,
        versions=versions(),
    )
    if not (try_donation and argnums):
        return report
    tried = tried_donation(report, fn, args, lowered, compiled, known)
    return dataclasses.replace(report, tried=tried)


def refused_text(memory: Memory, way_out: str) -> str:
    """Return the warning of a report whose program the compiler refuses as too large."""
    return (
        f"the compiler refuses this program, which needs {memory_text(memory.peak)}; results and "
        f"temporaries are not told apart. {way_out}"
    )


def versions() -> tuple[str, ...]:
    """Return JAX and the compilers that are installed, with their versions."""
    return tuple(f"{name} {version}" for name, version in compiler_versions().items())


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
