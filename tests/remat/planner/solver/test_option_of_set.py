"""What a given save set needs: as the reference says, and as the solver says of its own sets."""

from hypothesis import given
from hypothesis import strategies as st

from jrc.remat._planner.solver.option import Option
from jrc.remat._planner.solver.option_of_set import (
    left_to_jax,
    option_of_decision,
    option_of_set,
)
from jrc.remat._planner.solver.solver import solve
from tests.remat.planner.reference_plans import (
    cost_of,
    loops_inside_of,
    node_tables,
    stands_outside,
    values_of,
    ways_of,
    ways_of_constructs,
)
from tests.remat.planner.solver.test_plan_solve import BOUNDED

TIMES = st.sampled_from([1, 1, 3])


def figures(option):
    return option and (option.peak, option.cost, option.saved)


@given(data=st.data(), times=TIMES)
@BOUNDED
def test_sets_of_the_solver_need_what_it_says(data, times):
    graph = data.draw(node_tables(most=9))
    options = data.draw(ways_of(graph))
    for option in solve(graph, options, times):
        nodes = filter(stands_outside, graph.nodes)
        ways = zip(nodes, ways_of_constructs(graph, options, option), strict=True)
        outside = {node.position: way for node, way in ways if isinstance(way, Option)}
        inside = loops_inside_of(options, option)
        again = option_of_set(graph, values_of(graph, option), outside, times, inside)
        assert figures(again) == figures(option)
        assert figures(option_of_decision(graph, option.stages, options, times)) == figures(option)


@given(data=st.data(), times=TIMES)
@BOUNDED
def test_any_set_needs_what_the_reference_says(data, times):
    """Constructs are recomputed with their regions, but for effects, which no region holds."""
    graph = data.draw(node_tables(most=9))
    saved = data.draw(st.frozensets(st.sampled_from(range(len(graph.sizes)))))
    nodes = filter(stands_outside, graph.nodes)
    ways = [left_to_jax(node) if node.has_effects else None for node in nodes]
    cost = cost_of(graph, saved, ways, times)
    want = cost and (cost.peak, cost.cost, cost.saved)
    found = option_of_set(graph, saved, None, times)
    assert figures(found) == want
    assert not found or values_of(graph, found) >= cost.kept


@given(graph=node_tables(most=9))
@BOUNDED
def test_what_stands_where_a_recomputed_value_is_live_is_recomputed_too(graph):
    """Left to JAX is what can be; the rest is as if it had not been asked for."""
    left = {node.position: left_to_jax(node) for node in graph.nodes if node.may_stand_outside}
    found = option_of_set(graph, (), left)
    if found is None:
        return
    nodes = list(filter(stands_outside, graph.nodes))
    ways = ways_of_constructs(graph, {}, found)
    cost = cost_of(graph, frozenset(), ways)
    assert figures(found) == (cost.peak, cost.cost, cost.saved)
    for k, way in enumerate(ways):
        if way is None and nodes[k].may_stand_outside:
            others = [*ways[:k], left_to_jax(nodes[k]), *ways[k + 1 :]]
            assert cost_of(graph, frozenset(), others) is None
