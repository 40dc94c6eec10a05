"""The equation that pins the peak, as errors name it."""

from jrc._jaxpr import UNKNOWN, Program, is_variable, nbytes, own_place, place
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode


def widest_equation(program: Program, graph: CostGraph) -> str:
    """Return the equation whose differentiation alone needs most bytes, as a label."""

    def width(node: CostNode) -> int:
        eqn = program.eqns[program.steps[node.position]]
        own = sum(nbytes(x.aval) for x in (*eqn.invars, *eqn.outvars) if is_variable(x))
        return own * (node.active and bool(node.cost))

    nodes = [node for node in graph.nodes if node.position >= 0]
    if not nodes:
        return "nothing"
    k = program.steps[max(nodes, key=width).position]
    eqn = program.eqns[k]
    own = own_place(eqn)
    return program.name(k) + ("" if own in (UNKNOWN, place(eqn)) else f", from {own}")
