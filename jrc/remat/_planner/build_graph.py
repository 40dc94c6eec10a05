"""Weighing a program: what each of its equations costs, in bytes and operations."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jrc._jaxpr import INPUT, Program, equation_flops, has_effects, is_variable, nbytes
from jrc.remat._planner.activity import schedule
from jrc.remat._planner.cost_graph import CostGraph, CostNode
from jrc.remat._planner.derivative_reads import DerivativeReads
from jrc.remat._planner.equation_kinds import is_fused, is_heavy, runs_once
from jrc.remat._planner.save_candidates import save_candidates


def build_cost_graph(program: Program, active: set[Any], carried: Sequence[Any] = ()) -> CostGraph:
    """The graph of a program.

    Args:
        program: The program.
        active: The variables through which derivatives flow.
        carried: Inputs that are not there in the backward pass unless they are kept: what goes
            around a loop.
    """
    eqns, steps = program.eqns, {p: k for k, p in enumerate(program.steps)}
    order = [p for p in schedule(program) if p in steps]
    made = [*carried, *(v for p in order for v in eqns[p].outvars)]
    number = {var: k for k, var in enumerate(made)}
    reads = DerivativeReads()
    cotangent_bytes = _cotangents(program, order, active)
    fused = [program.producer[v] != INPUT and is_fused(eqns[program.producer[v]]) for v in made]
    nodes = [_arriving(number, carried)] if carried else []
    for p, cotangents in zip(order, cotangent_bytes, strict=True):
        eqn, differentiated = eqns[p], not active.isdisjoint(eqns[p].outvars)
        derivative_reads, inner_bytes = (
            reads.of(program, p, active) if differentiated else ((), None)
        )
        roots = filter(is_variable, map(program.source, derivative_reads))
        needed = [number[v] for v in roots if v in number]
        nodes.append(
            CostNode(
                position=steps[p],
                reads=tuple(number[v] for v in program.sources(p) if v in number),
                makes=tuple(number[v] for v in eqn.outvars),
                derivative_reads=frozenset(needed),
                flops=equation_flops(eqn),
                inner_bytes=inner_bytes,
                active=differentiated,
                runs_once=runs_once(eqn),
                has_effects=has_effects(eqn),
                cotangent_bytes=cotangents,
                operands=tuple(
                    (v, _operand_bytes(program, made[v]))
                    for v in dict.fromkeys(needed)
                    if fused[v] and is_heavy(eqn)
                ),
            )
        )
    sizes = tuple(nbytes(v.aval) for v in made)
    lasts = _lasting(nodes, fused)
    kinds = list(zip(sizes, fused, lasts, strict=True))
    return CostGraph(
        nodes=tuple(nodes),
        sizes=sizes,
        remade=tuple(size if lasts and not fused else 0 for size, fused, lasts in kinds),
        passing=tuple(0 if lasts or fused else size for size, fused, lasts in kinds),
        may_save=tuple(save_candidates(nodes, sizes, fused)),
        names=tuple(_name(program, v, steps) for v in made),
    )


def _arriving(number: Mapping[Any, int], carried: Sequence[Any]) -> CostNode:
    """Return the carries of a loop as a node of their own, which must not be run again."""
    return CostNode(
        position=INPUT, reads=(), makes=tuple(number[v] for v in carried),
        derivative_reads=frozenset(), flops=0, inner_bytes=None, active=False, runs_once=True,
        has_effects=False, cotangent_bytes=0, operands=(),
    )  # fmt: skip


def _operand_bytes(program: Program, var: Any) -> int:
    """Bytes of a value that XLA makes for a product; on CPU also of what was broadcast for it."""
    eqn = program.eqns[program.producer[var]]
    size = nbytes(var.aval)
    shapes = (getattr(x.aval, "shape", ()) for x in eqn.invars)
    stretched = any(shape and math.prod(shape) < math.prod(var.aval.shape) for shape in shapes)
    return size * (2 if stretched and jax.default_backend() == "cpu" else 1)


def _lasting(nodes: Sequence[CostNode], fused: Sequence[bool]) -> list[bool]:
    """Which values a derivative reads, as they are or through what XLA fuses with it."""
    lasting = [False] * len(fused)
    for node in reversed(nodes):
        for v in node.derivative_reads:
            lasting[v] = True
        if any(lasting[v] and fused[v] for v in node.makes):
            for v in node.reads:
                lasting[v] = True
    return lasting


def _cotangents(program: Program, order: Sequence[int], active: set[Any]) -> list[int]:
    """Bytes of cotangents that are there while each equation is differentiated.

    That of a value comes with its last reader and goes with its maker; that of an input stays.
    Between operators that XLA fuses there is none. XLA lends the room of results that are not
    there yet to temporaries, which is why it matters when a gradient is made.
    """
    at = {p: k for k, p in enumerate(order)}
    reading: dict[Any, list[int]] = {}
    for p in order:
        for var in program.sources(p):
            reading.setdefault(var, []).append(at[p])
    heavy = list(itertools.accumulate((is_heavy(program.eqns[p]) for p in order), initial=0))
    change = [0] * (len(order) + 1)
    for var in active.intersection(program.jaxpr.invars):
        readers = reading.get(var, [])
        change[0] += nbytes(var.aval)
        change[min(max(readers, default=0) + 1, len(order))] -= nbytes(var.aval)
    for p in order:
        for var in program.eqns[p].outvars:
            readers = reading.get(var, [])
            # A reader that is heavy, or something heavy between two readers.
            if var in active and readers and heavy[max(readers) + 1] > heavy[min(readers)]:
                change[at[p]] += nbytes(var.aval)
                change[max(readers) + 1] -= nbytes(var.aval)
    return list(itertools.accumulate(change))[:-1]


def _name(program: Program, var: Any, steps: Mapping[int, int]) -> tuple[int, int]:
    p = program.producer[var]
    if p == INPUT:
        return p, list(program.jaxpr.invars).index(var)
    return steps[p], list(program.eqns[p].outvars).index(var)
