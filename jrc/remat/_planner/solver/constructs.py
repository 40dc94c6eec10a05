"""Planning inside of loops, branches and `shard_map`: the options of such a construct."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jrc._jaxpr import (
    Program,
    in_shard_map,
    inlined_program,
    is_variable,
    primitive_name,
    repeats,
)
from jrc._tree import is_floating
from jrc.remat._gradient.activity import active_variables
from jrc.remat._planner.costs.build_cost_graph import build_cost_graph
from jrc.remat._planner.costs.compilers import CPU, Compiler
from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.costs.cost_unit import FLOPS, CostUnit
from jrc.remat._planner.costs.memory_model import kept_by_xla
from jrc.remat._planner.plan.decision import Mapped, variable_at
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.branches import branch_options
from jrc.remat._planner.solver.loops import loop_options
from jrc.remat._planner.solver.offload import with_offloaded
from jrc.remat._planner.solver.option import Option
from jrc.remat._planner.solver.option_of_set import option_of_set
from jrc.remat._planner.solver.solver import TooMuchWork, solve

_logger = logging.getLogger("jrc")

Options = dict[int, list[Option]]
"""By position, the options of each construct, the leanest first."""


def pareto_front(
    program: Program,
    perturbed: Iterable[Any],
    wanted: Iterable[Any],
    times: int = 1,
    carried: Sequence[Any] = (),
    compiler: Compiler = CPU,
    unit: CostUnit = FLOPS,
    copy_bandwidth: float | None = None,
    most: int | None = None,
    results: Sequence[int] = (),
    graphs: dict[Any, CostGraph] | None = None,
) -> tuple[CostGraph, Options, list[Option]]:
    """Return the cost graph of a program, options of its constructs, and the Pareto front.

    Args:
        program: The program.
        perturbed: The inputs that it is differentiated by.
        wanted: The results that are differentiated.
        times: How often the program runs (the body of a loop).
        carried: Inputs that are carries of a loop.
        compiler: What is assumed of the platform's compiler.
        unit: What costs are counted in.
        copy_bandwidth: Bytes per second of copies to the host, where saved values may move.
        most: About how many options of the front.
        results: Bytes of each result in whose memory saved values may lie.
        graphs: Where the cost graph is put, and those of the programs inside, by their jaxprs.
    """
    active = active_variables(program, perturbed, wanted)
    unit = unit.in_loop if times > 1 else unit
    graph = build_cost_graph(program, active, carried, compiler, results, unit, times > 1)
    # Copies inside of a loop in a loop are left alone.
    graphs = {} if graphs is None else graphs
    graphs[program.jaxpr] = graph
    options = _inner_options(
        program, active, compiler, unit, copy_bandwidth if times == 1 else None, graphs
    )
    front = front_of(graph, options, times, most)
    if copy_bandwidth and times > 1:
        may_move = [_may_move(program, place) for place in graph.names]
        front = with_offloaded(graph, options, front, times, may_move, copy_bandwidth)
    return graph, options, front


def front_of(
    graph: CostGraph,
    options: Mapping[int, Sequence[Option]],
    times: int = 1,
    most: int | None = None,
) -> list[Option]:
    """Return the Pareto front, of a few save sets where a search takes too much work."""
    try:
        return solve(graph, options, times, most=most)
    except TooMuchWork:
        _logger.warning(
            "jrc: a program of %d equations takes the planner too much work; its candidates are "
            "manual plans",
            len(graph.nodes),
        )
        return _without_search(graph, options, times)


def _without_search(
    graph: CostGraph, options: Mapping[int, Sequence[Option]], times: int
) -> list[Option]:
    """The Pareto front of a few save sets: nothing, kernels' results, all that XLA keeps."""
    kernels = frozenset(v for node in graph.nodes for v in node.makes if not graph.is_fused(v))
    sets = (frozenset(), kernels, kept_by_xla(graph, graph.nodes))
    lean = {k: some[0] for k, some in options.items()}
    rich = {k: min(some, key=lambda each: each.cost) for k, some in options.items()}
    ways = itertools.product(sets, (lean, rich))
    found = filter(None, (option_of_set(graph, saved, way, times) for saved, way in ways))
    front: list[Option] = []
    for option in sorted(found, key=lambda each: (each.peak, each.cost)):
        if not front or option.cost < front[-1].cost:
            front.append(option)
    return front


def _may_move(program: Program, place: tuple[int, int]) -> bool:
    """Whether a value can be saved on the host: real numbers that have an axis."""
    aval = variable_at(program, place).aval
    return is_floating(aval) and aval.ndim > 0 and not jnp.iscomplexobj(aval)


def _inner_options(
    program: Program,
    active: set[Any],
    compiler: Compiler,
    unit: CostUnit,
    copy_bandwidth: float | None,
    graphs: dict[Any, CostGraph],
) -> Options:
    """The options of each construct that can be planned inside, the leanest first."""
    front = functools.partial(
        pareto_front, compiler=compiler, unit=unit, copy_bandwidth=copy_bandwidth, graphs=graphs
    )
    found = {}
    for k, p in enumerate(program.steps):
        eqn = program.eqns[p]
        options = _PLANNED.get(primitive_name(eqn))
        if options and repeats(eqn) > 0 and not active.isdisjoint(eqn.outvars):
            found[k] = options(front, program, k, active)
    return found


def _shard_map_options(
    front: Callable[..., Any], program: Program, k: int, active: set[Any]
) -> list[Option]:
    """Options of a `shard_map`, whose sizes are those of one device's part."""
    eqn = program.eqns[program.steps[k]]

    def options(jaxpr: Any) -> list[Option]:
        body = inlined_program(jaxpr)
        pairs = zip(body.jaxpr.invars, eqn.invars, strict=True)
        perturbed = [v for v, x in pairs if is_variable(x) and x in active]
        most = SETTINGS.mapped_options
        _, _, found = front(body, perturbed, body.jaxpr.outvars, most=most)
        return found

    return [
        dataclasses.replace(each, make_decision=functools.partial(_mapped, k, each))
        for each in in_shard_map(eqn, options)
    ]


def _mapped(k: int, body: Option) -> Mapped:
    return Mapped(k, body.stages)


def _branch_options(
    front: Callable[..., Any], program: Program, k: int, active: set[Any]
) -> list[Option]:
    """Options of a `cond`, whose branches share the memory of what they save, on the device."""
    return branch_options(functools.partial(front, copy_bandwidth=None), program, k, active)


_PLANNED = {
    "scan": loop_options,
    "shard_map": _shard_map_options,
    "cond": _branch_options,
}
