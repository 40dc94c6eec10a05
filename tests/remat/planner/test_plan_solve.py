"""The solver: equal to every choice there is, and how far that is from re-running anything."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jrc.remat._gradient.activity import active_variables
from jrc.remat._planner.costs.build_cost_graph import build_cost_graph
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.program.trace import traced_for_plan
from jrc.remat._planner.search.search import highest_fitting
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.solver import ParetoPoint, solve, spread_evenly
from jrc.remat._planner.solver.stages import decision_of
from tests.remat.graphs import graphs
from tests.remat.planner.reference_plans import (
    chain_like,
    cost_of,
    every_choice,
    front,
    least_flops,
    least_flops_anywhere,
    node_tables,
    stands_outside,
    ways_of,
    ways_outside,
)

BOUNDED = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


COMPILATIONS, CANDIDATES = 5, 31


def planned(fn, *args):
    """The graph of a function's program, differentiated by all of its inputs."""
    program = traced_for_plan(fn, args, {}, "test").program
    jaxpr = program.jaxpr
    return build_cost_graph(program, active_variables(program, jaxpr.invars, jaxpr.outvars[:1]))


def chosen_ways(graph, options, point):
    """For every construct, in order, the way that a point has, `None` inside of a region."""
    return [
        next(way for way in ways if way.body == point.bodies[node.position])
        if node.position in point.bodies
        else None
        for node in graph.nodes
        if stands_outside(node)
        for ways in [ways_outside(node, options)]
    ]


@given(data=st.data(), times=st.sampled_from([1, 1, 3]))
@BOUNDED
def test_the_front_is_that_of_every_choice(data, times):
    graph = data.draw(node_tables(most=7))
    options = data.draw(ways_of(graph))
    want = front(every_choice(graph, options, times))
    points = solve(graph, options, times)
    assert [(point.peak, point.flops) for point in points] == want
    for point in points:
        cost = cost_of(graph, point.values, chosen_ways(graph, options, point), times)
        assert (cost.peak, cost.flops, cost.saved) == (point.peak, point.flops, point.saved)
        assert cost.kept <= point.values


def around_an_effect(may_save):
    """A value that the derivative reads behind an equation with an effect."""
    node = functools.partial(
        CostNode, flops=1, inner_bytes=None, active=True, runs_once=False, has_effects=False,
        cotangent_bytes=0, operands=(),
    )  # fmt: skip
    nodes = (
        node(0, (), (0,), frozenset()),
        node(1, (), (1,), frozenset(), runs_once=True, has_effects=True),
        node(2, (0, 1), (2,), frozenset({0})),
    )
    sizes = (8, 8, 8)
    return CostGraph(nodes, sizes, sizes, sizes, (may_save, True, True), ((0, 0), (1, 0), (2, 0)))


def test_a_graph_without_any_save_set_has_no_front():
    # No region may hold the effect, so that what crosses it cannot be recomputed.
    assert solve(around_an_effect(may_save=False)) == []
    assert not list(every_choice(around_an_effect(may_save=False)))
    (point,) = solve(around_an_effect(may_save=True))
    assert point.values >= {0}


@given(graph=node_tables(least=10, most=11, constructs=False))
@settings(BOUNDED, max_examples=4)
def test_the_front_of_larger_graphs(graph):
    want = front(every_choice(graph))
    assert [(point.peak, point.flops) for point in solve(graph)] == want


@pytest.mark.exhaustive
@given(graph=node_tables(least=13, most=14, constructs=False))
@settings(BOUNDED, max_examples=10)
def test_the_front_of_graphs_of_fourteen_nodes(graph):
    points = [(point.peak, point.flops) for point in solve(graph)]
    for peak, flops in front(every_choice(graph)):
        assert least_flops(points, peak) <= 1.01 * flops


@given(program=graphs(mark_all=False, max_ops=9))
@settings(BOUNDED, max_examples=12)
def test_the_front_of_random_programs(program):
    graph = planned(program, jnp.ones((4, 4)), jnp.ones((4, 4)))
    want = front(every_choice(graph))
    assert [(point.peak, point.flops) for point in solve(graph)] == want


def uneven(ws, x):
    """Products of very different sizes, and a skip over them all."""
    first = x
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(jnp.exp(x) * first)


def test_the_front_of_a_network():
    widths = [2, 16, 4, 32, 2]
    pairs = zip(widths, widths[1:], strict=False)
    graph = planned(uneven, [jnp.ones(shape) for shape in pairs], jnp.ones((8, 2)))
    points = solve(graph)
    assert [(point.peak, point.flops) for point in points] == front(every_choice(graph))
    assert len(points) >= 3 and points[-1].flops == 0


def test_what_is_run_again_is_what_the_choice_says():
    """The regions of a choice recompute exactly what the reference does, and keep the same."""
    ws = [jnp.ones((4, 4))] * 4
    graph = planned(uneven, ws, jnp.ones((8, 4)))
    for point in solve(graph):
        cost = cost_of(graph, point.values, [])
        decision = decision_of(graph, point)
        recomputed = {p for stage in decision.stages for p in stage.recomputed}
        assert recomputed == {graph.nodes[k].position for k in cost.recomputed}
        held = {place for stage in decision.stages for place in stage.saved}
        assert held == {graph.names[v] for v in point.values}
        run = [p for stage in decision.stages for p in stage.positions]
        assert sorted(run) == sorted(node.position for node in graph.nodes)


def test_the_front_by_hand():
    """A chain of three: keep all, or one and make the other again, or none."""
    node = CostNode(0, (), (0,), frozenset({0}), 10, None, True, False, False, 0, ())
    nodes = [
        node,
        dataclasses.replace(
            node, position=1, reads=(0,), makes=(1,), derivative_reads=frozenset({1})
        ),
        dataclasses.replace(
            node, position=2, reads=(1,), makes=(2,), derivative_reads=frozenset({1})
        ),
    ]
    sizes = (100, 40, 1)
    graph = CostGraph(tuple(nodes), sizes, sizes, (0,) * 3, (True,) * 3, ((0, 0), (1, 0), (2, 0)))
    # Value 0 stands alone at the end of the backward pass: recomputed there, it still counts.
    assert [(p.peak, p.flops, sorted(p.values)) for p in solve(graph)] == [
        (100, 10, [1]),
        (140, 0, [0, 1]),
    ]


def test_few_labels_still_reach_both_ends():
    graph = chain_like(np.random.default_rng(0), 16, 0.4)
    full, thin = solve(graph), solve(graph, settings=dataclasses.replace(SETTINGS, labels=4))
    assert len(thin) < len(full)
    assert thin[-1].flops == full[-1].flops == 0
    assert full[0].peak <= thin[0].peak < full[-1].peak
    assert all(a.peak < b.peak and a.flops > b.flops for a, b in zip(thin, thin[1:], strict=False))


def test_what_stands_before_a_collective_may_be_kept():
    """In a large program too, where what is made of inputs without work is not kept elsewhere."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def summed(w, x):
        return jax.lax.psum(jnp.sum(jnp.tanh(x @ w)), "data")

    sharded = jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())

    def loss(w, x):
        scaled = x * 2.0 + 1.0
        y = sharded(w, scaled) * x
        for _ in range(26):
            y = jnp.tanh(jnp.sin(y @ w))
        return jnp.sum(y * scaled)

    graph = planned(loss, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert not all(graph.may_save)
    (k,) = [k for k, node in enumerate(graph.nodes) if node.inner_bytes and node.runs_once]
    points = solve(graph)
    for point in points:
        assert graph.nodes[k].position in point.bodies
        assert {v for v in graph.nodes[k].reads} <= point.values


@pytest.mark.exhaustive
@pytest.mark.parametrize("count, skips", [(12, 0.0), (12, 0.4), (16, 0.4), (20, 0.0)])
def test_distance_to_re_running_anything_anywhere(count, skips, capsys):
    """Checkmate's program may make a value twice; a plan makes it once. That costs little."""
    graph = chain_like(np.random.default_rng(count), count, skips)
    points = [(point.peak, point.flops) for point in solve(graph)]
    total = 3 * sum(node.flops for node in graph.nodes)
    least, most = points[0][0], points[-1][0]
    distances = []
    for fraction in (0.05, 0.25, 0.5):
        budget = int(least + fraction * (most - least))
        bound, mine = least_flops_anywhere(graph, budget), least_flops(points, budget)
        assert bound <= mine + 1e-6
        distances.append((mine - bound) / total)
    with capsys.disabled():
        print(f"\n{count} nodes, skips {skips}: {distances} of the gradient program's operations")
    # Measured: at a twentieth of the way at most 0.083, at a quarter 0.011, at a half 0.
    assert distances[0] < 0.1 and distances[1] < 0.02 and distances[2] < 0.005


@given(fits=st.lists(st.integers(1, 50), min_size=1, max_size=CANDIDATES), data=st.data())
@settings(BOUNDED, max_examples=100)
def test_more_budget_never_gives_a_leaner_candidate(fits, data):
    """Whatever a candidate compiles to; few are asked, and what is found fits."""
    low, high = sorted((data.draw(st.integers(0, 51)), data.draw(st.integers(0, 51))))

    def search(budget):
        asked = []

        def is_enough(candidate):
            asked.append(candidate)
            return fits[candidate] <= budget

        found = highest_fitting(is_enough, len(fits))
        assert len(asked) == len(set(asked)) <= COMPILATIONS
        assert found is None or fits[found] <= budget
        return -1 if found is None else found

    assert search(low) <= search(high)


@given(steps=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), max_size=80))
@settings(BOUNDED, max_examples=50)
def test_spread_keeps_both_ends_and_the_order(steps):
    peaks = 1 + np.cumsum([0, *(peak for peak, _ in steps)])
    flops = np.cumsum([0, *(done for _, done in steps)])
    points = [
        ParetoPoint(int(peak), int(flops[-1] - done), 0, frozenset(), {})
        for peak, done in zip(peaks, flops, strict=True)
    ]
    some = spread_evenly(points, 1000, CANDIDATES - 1)
    assert some[0] is points[0] and some[-1] is points[-1]
    assert [id(p) for p in points if p in some] == [id(p) for p in some]
    assert len(some) <= CANDIDATES - 1
    assert len(points) > CANDIDATES - 1 or some == points
