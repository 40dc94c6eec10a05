"""What the solver assumes of XLA: what is fused, what lies in memory, and for how long.

The model has four assumptions. It finds and ranks candidates. The peak that a plan states as
predicted follows the values of its gradient program, in `buffer_peak`; compiled programs are the
judge of both.

1. **Fusion.** A result of a `Fusion.INSIDE` primitive takes no memory of its own: XLA computes it
   inside of whatever reads it. Where a kernel of its own (a product) reads it, it does take memory
   while that kernel is differentiated; on CPU twice, if it was broadcast for it, on TPU not.
2. **Recomputed values** lie in memory from the moment at which their region is recomputed until
   the equation that makes them has been differentiated, if a derivative reads them; else only for
   a moment.
3. **Cotangents.** The cotangent of a value lies in memory from its last reader to its maker, if a
   kernel of its own stands between them. That of an input stays to the end.
4. **Results** that are not computed yet lend their memory to saved values that are no larger,
   each to one at a time.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jrc._jaxpr import INPUT, Fusion, Program, facts_of, is_variable, nbytes
from jrc.remat._gradient.residuals import Residuals
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.costs.platform_memory import PlatformMemory
from jrc.remat._planner.settings import SETTINGS


def is_fused(eqn: Any) -> bool:
    """Return whether XLA computes what an equation makes inside of whatever reads it."""
    return facts_of(eqn).fusion is Fusion.INSIDE


def has_own_kernel(eqn: Any) -> bool:
    """Return whether XLA compiles an equation apart from its neighbours, as it does a product."""
    return facts_of(eqn).fusion is Fusion.NONE


def is_fused_variable(program: Program, var: Any) -> bool:
    """Return whether a variable is made by an equation that XLA fuses into its readers."""
    p = program.producer[var]
    return p != INPUT and is_fused(program.eqns[p])


def operand_bytes(program: Program, var: Any, memory: PlatformMemory) -> int:
    """Return the bytes of a fused value that XLA writes for a kernel of its own."""
    if memory.computes_operands:
        return 0
    eqn = program.eqns[program.producer[var]]
    size = memory.array_bytes(var.aval)
    shapes = (getattr(x.aval, "shape", ()) for x in eqn.invars)
    is_broadcast = any(shape and math.prod(shape) < math.prod(var.aval.shape) for shape in shapes)
    return size * (2 if is_broadcast and memory.writes_broadcasts else 1)


def values_read_late(
    derivative_reads: Sequence[Sequence[int]],
    reads: Sequence[Sequence[int]],
    makes: Sequence[Sequence[int]],
    fused: Sequence[bool],
) -> list[bool]:
    """Return which values a derivative reads, directly or through what XLA fuses with it.

    Args:
        derivative_reads: For each equation in order, the values that its derivative reads.
        reads: For each equation its operands.
        makes: For each equation its results.
        fused: For each value whether XLA fuses it into its readers.
    """
    late = [False] * len(fused)
    for needed, operands, results in reversed(
        list(zip(derivative_reads, reads, makes, strict=True))
    ):
        for v in needed:
            late[v] = True
        if any(late[v] and fused[v] for v in results):
            for v in operands:
                late[v] = True
    return late


def cotangent_bytes(
    program: Program, order: Sequence[int], active: set[Any], memory: PlatformMemory
) -> list[int]:
    """Return, for each equation in order, the bytes of cotangents while it is differentiated."""
    size = memory.array_bytes
    at = {p: k for k, p in enumerate(order)}
    readers: dict[Any, list[int]] = {}
    for p in order:
        for var in program.sources(p):
            readers.setdefault(var, []).append(at[p])
    kernels = list(
        itertools.accumulate((has_own_kernel(program.eqns[p]) for p in order), initial=0)
    )
    change = [0] * (len(order) + 1)
    for var in active.intersection(program.jaxpr.invars):
        last = max(readers.get(var, []), default=0)
        change[0] += size(var.aval)
        change[min(last + 1, len(order))] -= size(var.aval)
    for p in order:
        for var in program.eqns[p].outvars:
            reading = readers.get(var, [])
            # A kernel of its own reads the value, or stands between two readers.
            if var in active and reading and kernels[max(reading) + 1] > kernels[min(reading)]:
                change[at[p]] += size(var.aval)
                change[max(reading) + 1] -= size(var.aval)
    return list(itertools.accumulate(change))[:-1]


def kept_by_xla(graph: CostGraph, nodes: Iterable[CostNode]) -> frozenset[int]:
    """Return what XLA keeps for the backward pass of equations that are left to JAX.

    These are results of kernels and of passes over data, and the operands of kernels. What it can
    compute inside of a reader it computes there once more, whatever JAX saves.
    """
    kept: set[int] = set()
    for node in nodes:
        kept.update(v for v in node.makes if not graph.is_fused(v))
        kept.update(v for v, _ in node.operands)
    return frozenset(kept)


def bytes_left_to_jax(residuals: int, kept: int) -> int:
    """Return the bytes of temporaries where nothing is recomputed: halfway between two bounds.

    Args:
        residuals: Bytes of all that JAX saves. XLA recomputes some of it inside of readers.
        kept: The peak if XLA recomputed all that it may. It does not where it writes out
            broadcasts.
    """
    return (residuals + min(kept, residuals)) // 2


def lent_bytes(results: Iterable[int], values: Iterable[int]) -> int:
    """Return the bytes of values that lie in the memory of results that are not computed yet.

    Args:
        results: Bytes of each result.
        values: Bytes of each value that lies in memory before the first result is computed.

    >>> lent_bytes([10, 4], [8, 8, 3])
    11
    """
    free, lent = sorted(results), 0
    for size in sorted(values, reverse=True):
        if free and size <= free[-1]:
            free.pop()
            lent += size
    return lent


def should_try_plain_first(least: int, unfusable_bytes: int) -> bool:
    """Return whether nothing recomputed may need less than the leanest candidate.

    Args:
        least: Predicted temporaries of the leanest candidate, in bytes.
        unfusable_bytes: Residuals of kernels of their own, which XLA cannot but keep. The others
            it may recompute of its own accord, fused into what reads them.
    """
    return unfusable_bytes < SETTINGS.plain_first_ratio * least


def unfusable_bytes(residuals: Residuals) -> int:
    """Return the bytes of results of kernels of their own, from which all residuals follow.

    XLA may recompute the other residuals of its own accord, fused into what reads them.
    """
    program, wanted = residuals.inlined()
    seen, total = set(), 0
    while wanted:
        var = wanted.pop()
        p = program.producer[var] if is_variable(var) else INPUT
        if p == INPUT or var in seen:
            continue
        seen.add(var)
        if has_own_kernel(program.eqns[p]):
            total += nbytes(var.aval)
        else:
            wanted += program.reads(p)
    return total
