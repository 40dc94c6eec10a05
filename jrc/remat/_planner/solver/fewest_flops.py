"""Save sets of the fewest FLOPs, as further options where costs are modelled seconds.

On a CPU modelled seconds of passes over data are off by more than save sets differ in. A DenseNet
takes 14 % less with a save set that the model ranks behind others, and that a count of FLOPs finds.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jrc._jaxpr import Program
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.costs.cost_unit import TimeUnit
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option, spread_options
from jrc.remat._planner.solver.option_of_set import option_of_decision
from jrc.remat._planner.solver.solver import TooMuchWork, solve

Options = Mapping[int, Sequence[Option]]

# Few options of this front are taken.
_COARSE = dataclasses.replace(SETTINGS, labels=SETTINGS.labels // 8, states=SETTINGS.states // 8)


def with_fewest_flops(
    program: Program, graph: CostGraph, options: Options, front: Sequence[Option]
) -> list[Option]:
    """Return a front with a few options of the front by FLOPs among it, the leanest first.

    It stays as it is where costs are FLOPs already, and on accelerators.

    Args:
        program: The program.
        graph: Its cost graph.
        options: By position, the options of constructs in it; their costs stay seconds.
        front: Its front.
    """
    unit = graph.unit
    if graph.fuses_passes or not isinstance(unit, TimeUnit):
        return list(front)
    nodes = tuple(_in_flops(node, program, unit) for node in graph.nodes)
    counted = dataclasses.replace(graph, nodes=nodes, saving_costs=())
    try:
        by_flops = solve(counted, options, settings=_COARSE)
    except TooMuchWork:
        return list(front)
    found = spread_options(by_flops, 3 * counted.cost, SETTINGS.options_of_flops)
    known = {(each.peak, each.cost) for each in front}
    more = []
    for option in found:
        again = option_of_decision(graph, option.stages, options)
        if again is not None and (option.peak, again.cost) not in known:
            more.append(dataclasses.replace(option, cost=again.cost, family="fewest FLOPs"))
    return sorted([*front, *more], key=lambda each: each.peak)


def _in_flops(node: CostNode, program: Program, unit: TimeUnit) -> CostNode:
    """The node with its FLOPs as cost, as seconds of products."""
    flops = program.flops[program.steps[node.position]]
    return dataclasses.replace(node, cost=unit.of_seconds(flops / unit.rates.products))
