"""Planning inside of loops, branches and `shard_map`: the options of such a construct."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jrc._jaxpr import Program, evaluate, is_variable, primitive_name, rebuild, repeats
from jrc.remat._gradient.activity import active_variables
from jrc.remat._planner.branch_options import branch_options
from jrc.remat._planner.build_cost_graph import build_cost_graph
from jrc.remat._planner.cost_graph import CostGraph
from jrc.remat._planner.loop_options import loop_options
from jrc.remat._planner.memory_model import kept_by_xla
from jrc.remat._planner.platform_memory import CPU, PlatformMemory
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver import (
    InnerOption,
    ParetoPoint,
    TooMuchWork,
    solve,
    spread_evenly,
)
from jrc.remat._planner.stages import decision_of
from jrc.remat._planner.trace import inlined_program

_logger = logging.getLogger("jrc")


def pareto_front(
    program: Program,
    perturbed: Iterable[Any],
    wanted: Iterable[Any],
    times: int = 1,
    carried: Sequence[Any] = (),
    memory: PlatformMemory = CPU,
) -> tuple[CostGraph, dict[int, list[InnerOption]], list[ParetoPoint]]:
    """Return the cost graph of a program, options of its constructs, and the Pareto front.

    Args:
        program: The program.
        perturbed: The inputs that it is differentiated by.
        wanted: The results that are differentiated.
        times: How often the program runs (the body of a loop).
        carried: Inputs that are carries of a loop.
        memory: What is assumed of the platform.
    """
    active = active_variables(program, perturbed, wanted)
    graph = build_cost_graph(program, active, carried, memory)
    options = _inner_options(program, active, memory)
    try:
        points = solve(graph, options, times)
    except TooMuchWork:
        _logger.warning(
            "jrc: a program of %d equations takes the planner too much work; its candidates are "
            "ways by hand",
            len(graph.nodes),
        )
        points = _without_search(graph, options, times)
    return graph, options, points


def _without_search(
    graph: CostGraph, options: Mapping[int, Sequence[InnerOption]], times: int
) -> list[ParetoPoint]:
    """The Pareto front of a few save sets: nothing, kernels' results, all that XLA keeps."""
    kernels = frozenset(v for node in graph.nodes for v in node.makes if not graph.is_fused(v))
    sets = (frozenset(), kernels, kept_by_xla(graph, graph.nodes))
    found = [point for each in sets for point in solve(graph, options, times, saved=each)]
    front: list[ParetoPoint] = []
    for point in sorted(found, key=lambda each: (each.peak, each.flops)):
        if not front or point.flops < front[-1].flops:
            front.append(point)
    return front


def _inner_options(
    program: Program, active: set[Any], memory: PlatformMemory
) -> dict[int, list[InnerOption]]:
    """The options of each construct that can be planned inside, the leanest first."""
    front = functools.partial(pareto_front, memory=memory)
    found = {}
    for k, p in enumerate(program.steps):
        eqn = program.eqns[p]
        options = _PLANNED.get(primitive_name(eqn))
        if options and repeats(eqn) > 0 and not active.isdisjoint(eqn.outvars):
            found[k] = options(front, program, p, active)
    return found


def _shard_map_options(
    front: Callable[..., Any], program: Program, p: int, active: set[Any]
) -> list[InnerOption]:
    """Options of a `shard_map`, whose sizes are those of one device's part."""
    eqn = program.eqns[p]
    found: list[InnerOption] = []

    def run(jaxpr: Any) -> Any:
        def call(*inputs: Any) -> Any:
            # The mesh axes have names only while the body is traced; collectives need them.
            body = inlined_program(jaxpr)
            pairs = zip(body.jaxpr.invars, eqn.invars, strict=True)
            perturbed = [v for v, x in pairs if is_variable(x) and x in active]
            graph, _, points = front(body, perturbed, body.jaxpr.outvars)
            found[:] = [
                InnerOption(point.saved, point.peak, point.flops, decision_of(graph, point))
                for point in spread_evenly(points, graph.flops, 2 * SETTINGS.inner_options)
            ]
            return evaluate(jaxpr)(*inputs)

        return call

    jax.make_jaxpr(rebuild(eqn, run))(*(x.aval for x in eqn.invars))
    return found


_PLANNED = {
    "scan": loop_options,
    "shard_map": _shard_map_options,
    "cond": branch_options,
}
