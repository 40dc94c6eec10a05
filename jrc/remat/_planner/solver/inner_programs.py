"""Planning inside of loops, branches and `shard_map`: the options of such a construct."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._jaxpr import Program, evaluate, is_variable, primitive_name, rebuild, repeats
from jrc._tree import is_floating
from jrc.remat._gradient.activity import active_variables
from jrc.remat._planner.costs.build_cost_graph import build_cost_graph
from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.costs.host_link import HostLink
from jrc.remat._planner.costs.memory_model import kept_by_xla
from jrc.remat._planner.costs.platform_memory import CPU, PlatformMemory
from jrc.remat._planner.execute.execute import variable_at
from jrc.remat._planner.program.trace import inlined_program
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.branch_options import branch_options
from jrc.remat._planner.solver.loop_options import loop_options, option_of
from jrc.remat._planner.solver.offload import priced, with_offloaded
from jrc.remat._planner.solver.solver import (
    InnerOption,
    ParetoPoint,
    TooMuchWork,
    solve,
    spread_evenly,
)

_logger = logging.getLogger("jrc")


def pareto_front(
    program: Program,
    perturbed: Iterable[Any],
    wanted: Iterable[Any],
    times: int = 1,
    carried: Sequence[Any] = (),
    memory: PlatformMemory = CPU,
    link: HostLink | None = None,
) -> tuple[CostGraph, dict[int, list[InnerOption]], list[ParetoPoint]]:
    """Return the cost graph of a program, options of its constructs, and the Pareto front.

    Args:
        program: The program.
        perturbed: The inputs that it is differentiated by.
        wanted: The results that are differentiated.
        times: How often the program runs (the body of a loop).
        carried: Inputs that are carries of a loop.
        memory: What is assumed of the platform.
        link: What copies to the host cost, where values inside of loops may be moved there.
    """
    active = active_variables(program, perturbed, wanted)
    graph = build_cost_graph(program, active, carried, memory)
    # Copies inside of a loop in a loop are left alone.
    options = _inner_options(program, active, memory, link if times == 1 else None)
    points = front_of(graph, options, times)
    if link:
        points = priced(points, options, times)
        if times > 1:
            may_move = [_may_move(program, place) for place in graph.names]
            points = with_offloaded(graph, options, points, times, may_move, link)
    return graph, options, points


def front_of(
    graph: CostGraph, options: Mapping[int, Sequence[InnerOption]], times: int = 1
) -> list[ParetoPoint]:
    """Return the Pareto front, of a few save sets where a search takes too much work."""
    try:
        return solve(graph, options, times)
    except TooMuchWork:
        _logger.warning(
            "jrc: a program of %d equations takes the planner too much work; its candidates are "
            "ways by hand",
            len(graph.nodes),
        )
        return _without_search(graph, options, times)


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


def _may_move(program: Program, place: tuple[int, int]) -> bool:
    """Whether a value can be saved on the host: real numbers that have an axis."""
    aval = variable_at(program, place).aval
    return is_floating(aval) and aval.ndim > 0 and not jnp.iscomplexobj(aval)


def _inner_options(
    program: Program, active: set[Any], memory: PlatformMemory, link: HostLink | None
) -> dict[int, list[InnerOption]]:
    """The options of each construct that can be planned inside, the leanest first."""
    front = functools.partial(pareto_front, memory=memory, link=link)
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
                option_of(graph, point)
                for point in spread_evenly(points, graph.flops, 2 * SETTINGS.inner_options)
            ]
            return evaluate(jaxpr)(*inputs)

        return call

    jax.make_jaxpr(rebuild(eqn, run))(*(x.aval for x in eqn.invars))
    return found


def _branch_options(
    front: Callable[..., Any], program: Program, p: int, active: set[Any]
) -> list[InnerOption]:
    """Options of a `cond`, whose branches share the memory of what they save, on the device."""
    return branch_options(functools.partial(front, link=None), program, p, active)


_PLANNED = {
    "scan": loop_options,
    "shard_map": _shard_map_options,
    "cond": _branch_options,
}
