"""What the solver assumes of XLA: what is fused, what lies in memory, and for how long.

The model has four assumptions. It finds and ranks options; what differs between platforms is in
`compilers`. Compiled programs are the judge.

1. **Fusion.** What a compiler `fuses` takes no memory of its own: XLA computes it inside of
   whatever reads it. Where a kernel of its own (a product) reads it, it does take memory
   while that kernel is differentiated.
2. **Recomputed values** lie in memory from the moment at which their region is recomputed until
   the equation that makes them has been differentiated, if a derivative reads them; else only for
   a moment.
3. **Cotangents.** The cotangent of a value lies in memory from its last reader to its maker, if a
   kernel of its own stands between them, whose derivative the compiler does not fuse. That of an
   input stays to the end.
4. **Results** that are not computed yet share their memory with saved values that are no larger,
   each with one at a time.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jrc._jaxpr import INPUT, Fusion, Program, facts_of
from jrc.remat._planner.costs.compilers import Compiler
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode


def has_own_kernel(eqn: Any) -> bool:
    """Return whether XLA compiles an equation apart from its neighbours, as it does a product."""
    return facts_of(eqn).fusion is Fusion.NONE


def is_fused_variable(program: Program, var: Any, compiler: Compiler) -> bool:
    """Return whether a variable is made by an equation that XLA fuses into its readers."""
    p = program.producer[var]
    return p != INPUT and compiler.fuses(program.eqns[p])


def values_read_late(nodes: Sequence[CostNode], fused: Sequence[bool]) -> list[bool]:
    """Return which values a derivative reads, directly or through what XLA fuses with it.

    Args:
        nodes: The equations in order.
        fused: For each value whether XLA fuses it into its readers.
    """
    late = [False] * len(fused)
    for node in reversed(nodes):
        for v in node.derivative_reads:
            late[v] = True
        if any(late[v] and fused[v] for v in node.makes):
            for v in node.reads:
                late[v] = True
    return late


def cotangent_bytes(
    program: Program, order: Sequence[int], active: set[Any], compiler: Compiler
) -> list[int]:
    """Return, for each equation in order, the bytes of cotangents while it is differentiated.

    Of a value that a later kernel or pass reads too, what a kernel adds to the cotangent is an
    array of its own: that of a gather is a scatter into zeros.
    """
    size = compiler.array_bytes
    at = {p: k for k, p in enumerate(order)}
    readers: dict[Any, list[int]] = {}
    for p in order:
        for var in program.sources(p):
            readers.setdefault(var, []).append(at[p])
    eqns = [program.eqns[p] for p in order]
    own = [has_own_kernel(eqn) and not compiler.fuses_derivative(eqn) for eqn in eqns]
    kernels = list(itertools.accumulate(own, initial=0))
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

    def is_there(var: Any, k: int) -> bool:
        """Whether something of a cotangent was written before equation `k` adds to it."""
        return any(own[i] or not compiler.fuses_passes for i in readers[var] if i > k)

    added = [
        sum(size(v.aval) for v in active.intersection(program.sources(p)) if is_there(v, k))
        if own[k]
        else 0
        for k, p in enumerate(order)
    ]
    return [a + b for a, b in zip(itertools.accumulate(change[:-1]), added, strict=True)]


def passing_bytes(
    program: Program, order: Sequence[int], active: set[Any], late: set[Any], compiler: Compiler
) -> list[int]:
    """Return, for each equation in order, the bytes of values without a derivative that are live.

    They lie in memory for a while in the forward pass, beside what is saved before.

    Args:
        program: The program.
        order: Its equations in the order in which they run.
        active: The variables that a derivative flows through.
        late: What a derivative reads; that is saved, or recomputed.
        compiler: What is assumed of the platform's compiler.
    """
    at = {p: k for k, p in enumerate(order)}
    change = [0] * (len(order) + 1)
    for p in order:
        for var in program.eqns[p].outvars:
            if var in active or var in late or is_fused_variable(program, var, compiler):
                continue
            last = max((at[c] for c in program.consumers.get(var, ()) if c in at), default=at[p])
            size = compiler.value_bytes(program, var)
            change[at[p]] += size
            change[last + 1] -= size
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


def shared_bytes(results: Iterable[int], values: Iterable[int]) -> int:
    """Return the bytes of values that lie in the memory of results that are not computed yet.

    Args:
        results: Bytes of each result.
        values: Bytes of each value that lies in memory before the first result is computed.

    >>> shared_bytes([10, 4], [8, 8, 3])
    11
    """
    free, shared = sorted(results), 0
    for size in sorted(values, reverse=True) if free else ():
        if free and size <= free[-1]:
            free.pop()
            shared += size
    return shared
