"""Planning inside of loops, branches and `shard_map`: the options of such a construct."""

import dataclasses
import functools
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
from jrc.remat._gradient.activity import active_variables
from jrc.remat._planner.branch_options import branch_options
from jrc.remat._planner.build_cost_graph import build_cost_graph
from jrc.remat._planner.cost_graph import CostGraph
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver import InnerOption, ParetoPoint, solve, spread_evenly
from jrc.remat._planner.stages import decision_of
from jrc.remat._planner.trace import inlined_program


def pareto_front(
    program: Program,
    perturbed: Iterable[Any],
    wanted: Iterable[Any],
    times: int = 1,
    carried: Sequence[Any] = (),
) -> tuple[CostGraph, dict[int, list[InnerOption]], list[ParetoPoint]]:
    """Return the cost graph of a program, options of its constructs, and the Pareto front.

    Args:
        program: The program.
        perturbed: The inputs that it is differentiated by.
        wanted: The results that are differentiated.
        times: How often the program runs (the body of a loop).
        carried: Inputs that are carries of a loop.
    """
    active = active_variables(program, perturbed, wanted)
    graph = build_cost_graph(program, active, carried)
    options = _inner_options(program, active)
    return graph, options, solve(graph, options, times)


def _inner_options(program: Program, active: set[Any]) -> dict[int, list[InnerOption]]:
    """The options of each construct that can be planned inside, the leanest first."""
    found = {}
    for k, p in enumerate(program.steps):
        eqn = program.eqns[p]
        options = _PLANNED.get(primitive_name(eqn))
        if options and repeats(eqn) > 0 and not active.isdisjoint(eqn.outvars):
            found[k] = options(program, p, active)
    return found


def _loop_options(program: Program, p: int, active: set[Any]) -> list[InnerOption]:
    """Options of a `scan`: plans of its body, and the same in chunks."""
    eqn = program.eqns[p]
    body, length = inlined_program(eqn.params["jaxpr"]), repeats(eqn)
    start, count = loop_parts(eqn)
    end = start + count
    carried = body.jaxpr.invars[start:end]
    perturbed = _perturbed_in_loop(body, eqn, active, start, end)
    wanted = [x for x in body.jaxpr.outvars if is_variable(x) and is_floating(x.aval)]
    graph, _, points = pareto_front(body, perturbed, wanted, length, carried)
    options = [
        InnerOption(point.saved, point.peak, point.flops * length, decision_of(graph, point))
        for point in spread_evenly(points, graph.flops, SETTINGS.inner_options)
    ]
    if any(node.runs_once for node in graph.nodes if node.position >= 0):
        return _undominated(options)
    constants = sum(v.aval.size for v in perturbed.intersection(body.jaxpr.invars[:start]))
    return _undominated(options + _chunked(options, graph, length, carried, constants))


def _perturbed_in_loop(body: Program, eqn: Any, active: set[Any], start: int, end: int) -> set[Any]:
    """The inputs of a loop's body that are differentiated in some step."""
    inputs = body.jaxpr.invars
    perturbed = {
        v for v, x in zip(inputs, eqn.invars, strict=True) if is_variable(x) and x in active
    }
    while True:
        reached = active_variables(body, perturbed, body.jaxpr.outvars) | perturbed
        pairs = zip(inputs[start:end], body.jaxpr.outvars[: end - start], strict=True)
        more = {v for v, x in pairs if is_variable(x) and x in reached}
        if more <= perturbed:
            return perturbed
        perturbed |= more


def _chunked(
    options: Sequence[InnerOption],
    graph: CostGraph,
    length: int,
    carried: Sequence[Any],
    constants: int,
) -> list[InnerOption]:
    """The options in chunks: carries between chunks are saved, each chunk is recomputed.

    Gradients of the `constants` entries that all steps read are added up chunk by chunk too.
    """
    carry = sum(nbytes(v.aval) for v in carried)
    found = []
    for option in options:
        each = option.saved / length
        work = option.peak - option.saved
        best = math.sqrt(length * each / max(carry, 1))
        for chunks in {_near_divisor(length, scale * best) for scale in SETTINGS.chunk_scales}:
            if not 1 < chunks < length:
                continue
            # Steps that are left over run last, and are not recomputed.
            size, rest = divmod(length, chunks)
            saved = int(chunks * carry + rest * each)
            peak = int(chunks * carry + max(size, rest) * each + work)
            flops = option.flops + (graph.flops * size + constants) * chunks
            body = dataclasses.replace(option.body, chunks=chunks)
            found.append(InnerOption(saved, peak, flops, body))
    return found


def _near_divisor(length: int, target: float) -> int:
    """The divisor nearest to a number by ratio; the rounded number where all are far."""
    target = min(max(target, 1.0), float(length))
    divisors = [d for d in range(1, length + 1) if length % d == 0]
    best = min(divisors, key=lambda d: abs(math.log(d / target)))
    return best if 0.5 < best / target < 2 else max(1, round(target))


def _undominated(options: Sequence[InnerOption]) -> list[InnerOption]:
    """The options that no other beats in peak, saved bytes and FLOPs."""
    front: list[InnerOption] = []
    for option in sorted(options, key=lambda each: (each.peak, each.flops, each.saved)):
        if all(other.flops > option.flops or other.saved > option.saved for other in front):
            front.append(option)
    return front


def _shard_map_options(program: Program, p: int, active: set[Any]) -> list[InnerOption]:
    """Options of a `shard_map`, whose sizes are those of one device's part."""
    eqn = program.eqns[p]
    found: list[InnerOption] = []

    def run(jaxpr: Any) -> Any:
        def call(*inputs: Any) -> Any:
            # The mesh axes have names only while the body is traced; collectives need them.
            body = inlined_program(jaxpr)
            pairs = zip(body.jaxpr.invars, eqn.invars, strict=True)
            perturbed = [v for v, x in pairs if is_variable(x) and x in active]
            graph, _, points = pareto_front(body, perturbed, body.jaxpr.outvars)
            found[:] = [
                InnerOption(point.saved, point.peak, point.flops, decision_of(graph, point))
                for point in spread_evenly(points, graph.flops, 2 * SETTINGS.inner_options)
            ]
            return evaluate(jaxpr)(*inputs)

        return call

    jax.make_jaxpr(rebuild(eqn, run))(*(x.aval for x in eqn.invars))
    return found


_PLANNED = {
    "scan": _loop_options,
    "shard_map": _shard_map_options,
    "cond": functools.partial(branch_options, pareto_front),
}
