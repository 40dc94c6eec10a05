"""The options of a program: those of the solver, and manual plans when they are asked for."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrc._jaxpr import nbytes
from jrc.remat._planner.costs.compilers import Compiler
from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.costs.cost_unit import CostUnit
from jrc.remat._planner.costs.host_link import HostLink
from jrc.remat._planner.program.trace import TracedForPlan
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.constructs import Options, front_of, pareto_front
from jrc.remat._planner.solver.manual import manual_options
from jrc.remat._planner.solver.option import Option, spread_options


@dataclasses.dataclass(frozen=True)
class FoundOptions:
    """The cost graph of a program, options of constructs, the solver's front, and manual plans.

    The cost graphs are those of the program and of all programs inside.
    """

    graph: CostGraph
    graphs: Mapping[Any, CostGraph]
    options: Options
    front: list[Option]
    make_manual: Callable[[], list[Option]]


def options_of(
    traced: TracedForPlan,
    perturbed: Sequence[Any],
    compiler: Compiler,
    unit: CostUnit,
    link: HostLink | None,
) -> FoundOptions:
    """Return the options of a program.

    Args:
        traced: The program.
        perturbed: The inputs that it is differentiated by.
        compiler: What is assumed of the platform's compiler.
        unit: What costs are counted in.
        link: How long copies to the host take, where saved values may be moved there.
    """
    program = traced.program
    results = [nbytes(v.aval) for v in perturbed]
    graphs: dict[Any, CostGraph] = {}
    graph, options, front = pareto_front(
        program,
        perturbed,
        program.jaxpr.outvars[:1],
        compiler=compiler,
        unit=unit,
        link=link,
        results=results,
        graphs=graphs,
    )
    front = spread_options(front, 3 * graph.cost, SETTINGS.options)
    on_device = {k: [each for each in some if not each.host] for k, some in options.items()}

    def make_manual() -> list[Option]:
        manual = manual_options(program, graph, on_device)
        if any(each.host for each in front):
            # What moves less than the model says must not hide what was reached without it.
            lean = front_of(graph, on_device, most=1)
            name = "leanest with nothing moved"
            manual += [dataclasses.replace(each, name=name) for each in lean]
        return manual

    return FoundOptions(graph, graphs, options, front, make_manual)
