"""Planning inside of loops and `shard_map`: ways to keep what their bodies' derivatives read."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jrc._jaxpr import (
    Program,
    evaluate,
    is_variable,
    loop_parts,
    nbytes,
    primitive_name,
    rebuild,
    repeats,
)
from jrc._tree import is_floating
from jrc.remat._planner.activity import active_variables
from jrc.remat._planner.build_graph import build_cost_graph
from jrc.remat._planner.cost_graph import CostGraph
from jrc.remat._planner.execute import inlined_program
from jrc.remat._planner.regions import decision_of
from jrc.remat._planner.solver import InnerOption, ParetoPoint, solve, spread_evenly

# Ways of one construct that the program around it chooses from.
_WAYS = 64


def inner_options(program: Program, active: set[Any]) -> dict[int, list[InnerOption]]:
    """For each construct that can be planned inside, its ways, the leanest first."""
    found = {}
    for k, p in enumerate(program.steps):
        eqn = program.eqns[p]
        planned = primitive_name(eqn) in _PLANNED and repeats(eqn) > 0
        if planned and not active.isdisjoint(eqn.outvars):
            found[k] = _PLANNED[primitive_name(eqn)](program, p, active)
    return found


def pareto_front(
    program: Program,
    perturbed: Iterable[Any],
    wanted: Iterable[Any],
    times: int = 1,
    carried: Sequence[Any] = (),
) -> tuple[CostGraph, list[ParetoPoint]]:
    """The graph of a program and the front of choices, those inside its constructs included."""
    active = active_variables(program, perturbed, wanted)
    graph = build_cost_graph(program, active, carried)
    return graph, solve(graph, inner_options(program, active), times)


def _loop(program: Program, p: int, active: set[Any]) -> list[InnerOption]:
    eqn = program.eqns[p]
    body, length = inlined_program(eqn.params["jaxpr"]), repeats(eqn)
    start, count = loop_parts(eqn)
    end = start + count
    carried = body.jaxpr.invars[start:end]
    perturbed = _moving_in_loop(body, eqn, active, start, end)
    wanted = [x for x in body.jaxpr.outvars if is_variable(x) and is_floating(x.aval)]
    graph, points = pareto_front(body, perturbed, wanted, length, carried)
    ways = [
        InnerOption(point.saved, point.peak, point.flops * length, decision_of(graph, point))
        for point in spread_evenly(points, _flops(graph), _WAYS)
    ]
    if any(node.runs_once for node in graph.nodes if node.position >= 0):
        return _front(ways)
    constants = sum(v.aval.size for v in perturbed.intersection(body.jaxpr.invars[:start]))
    return _front(ways + _chunked(ways, graph, length, carried, constants))


def _moving_in_loop(body: Program, eqn: Any, active: set[Any], start: int, end: int) -> set[Any]:
    """The inputs of a loop's body that are differentiated in some turn."""
    inputs = body.jaxpr.invars
    perturbed = {
        v for v, x in zip(inputs, eqn.invars, strict=True) if is_variable(x) and x in active
    }
    while True:
        through = active_variables(body, perturbed, body.jaxpr.outvars) | perturbed
        outs = body.jaxpr.outvars[: end - start]
        more = {
            v
            for v, x in zip(inputs[start:end], outs, strict=True)
            if is_variable(x) and x in through
        }
        if more <= perturbed:
            return perturbed
        perturbed |= more


def _chunked(
    ways: Sequence[InnerOption],
    graph: CostGraph,
    length: int,
    carried: Sequence[Any],
    constants: int,
) -> list[InnerOption]:
    """The same in chunks: the carries between them are kept, each chunk is run again.

    The gradients of what all turns read, so many `constants`, are added up chunk by chunk too.
    """
    carry = sum(nbytes(v.aval) for v in carried)
    once = _flops(graph)
    found = []
    for way in ways:
        each = way.saved / length
        work = way.peak - way.saved
        best = math.sqrt(length * each / max(carry, 1))
        for chunks in {_divisor(length, scale * best) for scale in (0.5, 1.0, 2.0)}:
            if not 1 < chunks < length:
                continue
            # What is left over runs last, and is not run again.
            size, rest = divmod(length, chunks)
            saved = int(chunks * carry + rest * each)
            peak = chunks * carry + max(size, rest) * each + work
            flops = way.flops + (once * size + constants) * chunks
            body = dataclasses.replace(way.body, chunks=chunks)
            found.append(InnerOption(saved, int(peak), flops, body))
    return found


def _flops(graph: CostGraph) -> int:
    return max(1, sum(node.flops for node in graph.nodes))


def _divisor(length: int, target: float) -> int:
    """The divisor nearest to a number, by ratio; the number itself where all are far."""
    target = min(max(target, 1.0), float(length))
    divisors = [d for d in range(1, length + 1) if length % d == 0]
    best = min(divisors, key=lambda d: abs(math.log(d / target)))
    return best if 0.5 < best / target < 2 else max(1, round(target))


def _front(ways: Sequence[InnerOption]) -> list[InnerOption]:
    """The ways that no other beats in peak, kept bytes and operations; about `_WAYS` of them."""
    ways = sorted(ways, key=lambda way: (way.peak, way.flops, way.saved))
    front: list[InnerOption] = []
    for way in ways:
        if all(other.flops > way.flops or other.saved > way.saved for other in front):
            front.append(way)
    return front


def _sharded(program: Program, p: int, active: set[Any]) -> list[InnerOption]:
    """Ways inside of `shard_map`, where sizes are those of one device's part."""
    eqn = program.eqns[p]
    found: list[InnerOption] = []

    def run(jaxpr: Any) -> Any:
        def call(*inputs: Any) -> Any:
            # In here the mesh axes have their names, without which collectives mean nothing.
            body = inlined_program(jaxpr)
            perturbed = [
                v
                for v, x in zip(body.jaxpr.invars, eqn.invars, strict=True)
                if is_variable(x) and x in active
            ]
            graph, points = pareto_front(body, perturbed, body.jaxpr.outvars)
            found[:] = [
                InnerOption(point.saved, point.peak, point.flops, decision_of(graph, point))
                for point in spread_evenly(points, _flops(graph), 2 * _WAYS)
            ]
            return evaluate(jaxpr)(*inputs)

        return call

    jax.make_jaxpr(rebuild(eqn, run))(*(x.aval for x in eqn.invars))
    return found


_PLANNED = {"scan": _loop, "shard_map": _sharded}
