"""Budgets: they hold, more never costs more, and what cannot be is told."""

import dataclasses
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc.remat._gradient.compiled_memory import memory_needed, memory_of
from jrc.remat._planner.search.compiled_cost import CompiledCost, compiled_cost
from jrc.remat._planner.search.problem import PlanningProblem
from jrc.remat._planner.search.search import choose
from tests.remat.planner.plan_cases import (
    WS,
    X,
    layers,
    mesh_of,
)

NET = ([jnp.full((8, 8), 0.1 + 0.01 * i) for i in range(8)], jnp.ones((64, 8)))


@functools.cache
def net():
    return PlanningProblem.of(layers, NET, 0, False, "test")


@functools.cache
def compiled(i):
    lean = jax.value_and_grad(net().applied(net().all[i], layers))
    return compiled_cost(jax.jit(lean).lower(*NET), None)


def planned(budget):
    return choose(net(), budget, lambda candidate: compiled(net().all.index(candidate)), "jrc.plan")


def test_every_budget_is_kept_and_more_never_costs_more():
    least, most = compiled(0).peak, compiled(len(net().candidates) - 1).peak
    plans = [planned(int(budget)) for budget in np.linspace(least, most, 9)]
    assert all(plan.verified.peak_bytes <= plan.budget for plan in plans)
    assert all(plan.compilations <= 5 for plan in plans)
    flops = [plan.verified.flops for plan in plans]
    assert flops == sorted(flops, reverse=True) and flops[0] > flops[-1]
    assert flops[-1] == plans[-1].unplanned_flops and not plans[-1].reruns


def test_a_plan_s_peak_is_that_of_the_compiled_program():
    least, most = compiled(0).peak, compiled(len(net().candidates) - 1).peak
    plan = jrc.plan(layers, *NET, budget=(least + most) // 2)
    program = jax.jit(jax.value_and_grad(plan.apply(layers))).lower(*NET).compile()
    assert plan.verified.peak_bytes == memory_of(program).peak <= plan.budget
    assert plan.reruns and plan == planned(plan.budget)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), NET)
    assert jrc.plan(layers, *shapes, budget=plan.budget) == plan


@pytest.mark.slow
def test_bytes_are_those_of_one_device():
    """Arguments and gradients are predicted as they lie; what is compiled is right throughout."""
    ws, x = NET
    mesh = mesh_of(4)
    columns, rows = (NamedSharding(mesh, spec) for spec in (P(None, "data"), P("data")))
    args = jax.device_put(ws, columns), jax.device_put(x, rows)
    shapes = [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=columns) for w in ws]
    shapes = shapes, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
    weights, batch = (sum(a.nbytes for a in jax.tree.leaves(tree)) for tree in NET)
    for each in (args, shapes):
        problem = PlanningProblem.of(layers, each, 0, False, "test")
        assert problem.given == (weights + batch) // 4
        assert problem.returned == weights // 4 + 4
    assert net().given == weights + batch and net().returned == weights + 4
    mixed = PlanningProblem.of(layers, (jax.device_put(ws, NamedSharding(mesh, P())), args[1]), 0,
                          False, "test")  # fmt: skip
    assert mixed.given == weights + batch // 4 and mixed.returned == weights + 4
    plan = jrc.plan(layers, *args, budget=0.5)
    program = jax.jit(jax.value_and_grad(plan.apply(layers))).lower(*args).compile()
    assert plan.verified.peak_bytes == memory_of(program).peak <= plan.budget < compiled(0).peak


def test_fractions_lie_between_the_two_ends():
    plans = [planned(fraction) for fraction in (0.0, 0.4, 1.0)]
    ends = [compiled(i).peak for i in (0, len(net().candidates))]
    assert plans[0].verified.peak_bytes <= min(ends)
    assert not plans[-1].reruns and plans[-1].verified.flops_ratio == 1.0
    budgets = [plan.budget for plan in plans]
    assert budgets == sorted(budgets) and budgets[1] == int(
        budgets[0] + 0.4 * (budgets[2] - budgets[0])
    )
    assert all(plan.verified.peak_bytes <= plan.budget for plan in plans)
    assert all(plan.compilations <= 8 for plan in plans)


@pytest.mark.parametrize("peaks", [(10, 40, 30, 50, 20), (30, 40, 10), (30, 20, 10), (5, 5, 5)])
def test_fractions_where_more_memory_is_no_less_work(peaks):
    """Whatever the compiled peaks: 1 is nothing recomputed, and no fraction is refused."""
    ordered = net().candidates[-len(peaks) :]
    some = dataclasses.replace(net(), candidates=ordered, by_hand=())
    memory = lambda candidate: CompiledCost(0, 0, peaks[ordered.index(candidate)], 0)  # noqa: E731
    plans = [choose(some, f / 8, memory, "jrc.plan") for f in range(9)]
    assert not plans[-1].reruns
    assert all(plan.verified.peak_bytes <= plan.budget for plan in plans)
    flops = [plan.verified.flops for plan in plans]
    assert flops == sorted(flops, reverse=True)


@pytest.mark.parametrize("compilations", [1, 2, 3])
def test_few_compilations_find_a_plan_that_fits(compilations):
    budget = (compiled(0).peak + compiled(len(net().candidates) - 1).peak) // 2
    plan = jrc.plan(layers, *NET, budget=budget, compilations=compilations)
    assert plan.reruns and plan.verified.peak_bytes <= budget
    assert plan.compilations <= max(compilations, 2)
    with pytest.raises(jrc.BudgetError):
        jrc.plan(layers, *NET, budget=1000, compilations=compilations)


def test_room_enough_takes_one_compilation():
    top = len(net().candidates) - 1
    enough = max(compiled(top).peak, net().predicted(net().candidates[top]).peak_bytes)
    for budget in (enough, 100 * enough):
        plan = jrc.plan(layers, *NET, budget=budget)
        assert not plan.reruns and plan.compilations == 1


def test_a_model_that_promised_too_much_costs_one_compilation():
    """Nothing re-run was said to fit and does not: the search goes on as it would have."""
    ordered, top = net().candidates, len(net().candidates) - 1
    budget = net().predicted(ordered[top]).peak_bytes
    sizes = {candidate: budget - 100 + 10 * i for i, candidate in enumerate(ordered)}
    sizes[ordered[top]] = budget + 1
    sizes = {candidate: min(size, budget + 1) for candidate, size in sizes.items()}
    plan = choose(
        net(), budget, lambda candidate: CompiledCost(0, 0, sizes[candidate], 0), "jrc.plan"
    )
    assert plan.reruns and plan.verified.peak_bytes <= budget
    assert plan.compilations <= 6


def test_a_budget_that_nothing_fits():
    with pytest.raises(jrc.BudgetError) as info:
        planned(1000)
    error, leanest = info.value, compiled(0)
    assert isinstance(error, ValueError)
    assert error.least_bytes == error.plan.verified.peak_bytes <= leanest.peak
    assert error.plan.budget == 1000 and error.plan.compilations <= 7
    assert re.fullmatch(
        r"jrc\.plan: the peak of the gradient of `layers` is at least 1\d\.\d\d KiB "
        r"\(1\d,\d{3} bytes\); the budget is 1,000 B\. "
        r"Of the least, arguments are 4 KiB, results and gradients 2\.0\d+ KiB, "
        r"temporaries 1\d(\.\d+)? KiB, pinned most by dot_general:\(64,8\)@plan_cases\.py:\d+\. "
        r"Raise the budget, or make the batch smaller: jrc\.largest_batch finds how small\.",
        str(error),
    )
    assert planned(error.least_bytes).verified.peak_bytes == error.least_bytes


def ways(*costs):
    """The small problem with these candidates by hand, each of temporaries and FLOPs."""
    by_hand = tuple(
        dataclasses.replace(
            net().candidates[0], temporaries=bytes_, recomputed=flops, name=f"way {i}"
        )
        for i, (bytes_, flops) in enumerate(costs)
    )
    return dataclasses.replace(net(), by_hand=by_hand)


def test_a_way_by_hand_that_costs_more_is_not_chosen():
    """Bisection finds nothing; of what is compiled last, one candidate and one way fit."""
    some = ways((10, 10**9))
    sizes = dict.fromkeys(some.all, 10**7)
    sizes |= {some.candidates[0]: 10**6 + 1, some.candidates[1]: 10**6, some.by_hand[0]: 10**6}
    memory = lambda candidate: CompiledCost(0, 0, sizes[candidate], 0)  # noqa: E731
    plan = choose(some, 10**6, memory, "jrc.plan")
    assert plan.predicted.flops == some.predicted(some.candidates[1]).flops


def test_few_programs_are_compiled_where_a_compilation_is_dear(caplog):
    """The ends of a fraction are those predicted leanest, and nothing recomputed."""
    few = PlanningProblem.of(layers, NET, 0, False, "test", 3, most=3)
    sizes = {each: few.predicted(each).peak_bytes for each in few.all}
    memory = lambda candidate: CompiledCost(0, 0, sizes[candidate], 0)  # noqa: E731
    least, most = min(sizes.values()), max(sizes.values())
    plans = [choose(few, int(b), memory, "jrc.plan") for b in np.linspace(least, most, 7)]
    assert max(plan.compilations for plan in plans) <= 3
    flops = [plan.predicted.flops for plan in plans]
    assert flops == sorted(flops, reverse=True)
    with caplog.at_level("INFO", "jrc"):
        assert choose(few, 0.5, memory, "jrc.plan").compilations <= 7
    assert "(compilation 1 of at most 7)" in caplog.text
    with pytest.raises(jrc.BudgetError) as info:
        choose(few, least // 2, memory, "jrc.plan")
    assert info.value.plan.compilations <= 5


def test_without_compilations_a_refusal_names_the_least_of_all():
    lean = net().candidates[0]
    some = ways((lean.temporaries - 64, lean.recomputed + 1))
    least = some.predicted(some.by_hand[0]).peak_bytes
    with pytest.raises(jrc.BudgetError) as info:
        choose(some, least // 2, None, "jrc.plan")
    assert info.value.least_bytes == least < some.predicted(lean).peak_bytes


def test_few_ways_by_hand_are_compiled():
    some = ways(*((100, 10 + i) for i in range(8)))
    sizes = dict.fromkeys(some.all, 10**7) | {some.candidates[0]: 10**6}
    memory = lambda candidate: CompiledCost(0, 0, sizes[candidate], 0)  # noqa: E731
    assert choose(some, 10**6, memory, "jrc.plan").compilations <= 8
    assert choose(some, 0.5, memory, "jrc.plan").compilations <= 9


def test_a_cheaper_way_by_hand_that_nearly_fits_is_compiled():
    """The prediction of one way is a little above the budget, and its compiled peak is not."""
    row = net().candidates
    some = ways((row[1].temporaries, 1))
    budget = some.predicted(some.by_hand[0]).peak_bytes - 64
    sizes = dict.fromkeys(some.all, 10**9) | {row[0]: budget, some.by_hand[0]: budget}
    memory = lambda candidate: CompiledCost(0, 0, sizes[candidate], 0)  # noqa: E731
    plan = choose(some, budget, memory, "jrc.plan")
    assert plan.predicted.flops == some.flops + 1


def test_without_compiling():
    """Then a plan is a guess: it has no verified cost, and is found by the prediction."""
    low, high = (net().predicted(net().candidates[i]).peak_bytes for i in (0, 3))
    plan = jrc.plan(layers, *NET, budget=high, verify=False)
    assert plan.verified is None and plan.compilations == 0
    # Nothing recomputed is predicted from its own program, and may fit where its neighbours do not.
    fitting = [each for each in net().candidates if net().predicted(each).peak_bytes <= high]
    assert plan.predicted in [net().predicted(each) for each in fitting]
    assert plan.predicted.flops <= net().predicted(net().candidates[3]).flops
    assert "predicted" in str(plan)
    with pytest.raises(jrc.BudgetError, match="is at least"):
        jrc.plan(layers, *NET, budget=low - 1, verify=False)


@pytest.mark.parametrize(
    "text, size",
    [
        ("1.5KiB", 1536),
        ("2kb", 2000),
        ("3 MB", 3_000_000),
        (" 1gib ", 2**30),
        ("12345", 12345),
        ("7 B", 7),
        (".5k", 500),
        (np.int64(9), 9),
        ("1e9", 10**9),
        ("1.5E+3", 1500),
        ("2e3 KiB", 2000 * 1024),
        ("2.e9", 2 * 10**9),
        (np.array(10), 10),
    ],
)
def test_budgets_in_words(text, size):
    with pytest.raises(jrc.BudgetError) as info:
        jrc.plan(jnp.sum, jax.ShapeDtypeStruct((2**40,), jnp.bfloat16), budget=text, verify=False)
    assert info.value.plan.budget == size


@pytest.mark.parametrize(
    "budget, kind, text",
    [
        (True, TypeError, "budget must be bytes (an int), text ('1.5GiB') or a fraction"),
        (None, TypeError, "got NoneType None"),
        ([1], TypeError, "got list [1]"),
        (float("nan"), ValueError, "a fraction in [0, 1] between the least peak (0)"),
        (1.5, ValueError, "got 1.5. Write bytes as an int or as text"),
        (-0.1, ValueError, "got -0.1"),
        (float("inf"), ValueError, "got inf"),
        (0, ValueError, "budget in bytes must be positive, got 0."),
        (-1, ValueError, "budget in bytes must be positive, got -1."),
        ("", ValueError, "a number and a unit, such as '1.5GiB', '800MB' or '123456 B', got ''."),
        ("12 parsecs", ValueError, "got '12 parsecs'."),
        ("GiB", ValueError, "got 'GiB'."),
        ("-1GiB", ValueError, "got '-1GiB'."),
        ("1 iB", ValueError, "got '1 iB'."),
        ("0.1", ValueError, "got '0.1'."),
        ("1e-1", ValueError, "got '1e-1'."),
        ("2.", ValueError, "got '2.'."),
        ("1.5e0", ValueError, "got '1.5e0'."),
        ("1.23456e3", ValueError, "got '1.23456e3'."),
        ("9" * 400, ValueError, "got '999"),
        (np.array(2.0), ValueError, "a fraction in [0, 1]"),
        (np.ones(2), TypeError, "got ndarray array([1., 1.])"),
        (np.float32(1.5), ValueError, "a fraction in [0, 1]"),
    ],
)
def test_what_is_no_budget(budget, kind, text):
    with pytest.raises(kind, match=re.escape(text)) as info:
        jrc.plan(layers, WS, X, budget=budget)
    assert str(info.value).startswith("jrc.plan: ")


def fused_chain(w):
    for _ in range(40):
        w = jnp.sin(w)
    return jnp.sum(w)


@pytest.mark.slow
def test_what_xla_recomputes_by_itself_is_not_planned_away():
    """JAX would keep forty values; XLA keeps none, so that no plan may cost more, or be refused."""
    w = jnp.ones((64, 64))
    plain = memory_needed(jax.jit(jax.value_and_grad(fused_chain)).lower(w)).peak
    for budget in (plain, 3 * plain, 10 * plain):
        plan = jrc.plan(fused_chain, w, budget=budget)
        assert not plan.reruns and plan.verified.peak_bytes == plain
    make_args = lambda n: (jax.ShapeDtypeStruct((n, 64), jnp.float32),)  # noqa: E731
    found = jrc.largest_batch(make_args, fused_chain, 100_000)
    assert 0 < found.plain <= found.recomputed and found.plan.verified.peak_bytes <= 100_000


@pytest.mark.slow
def test_a_refusal_goes_to_another_process_whole():
    with pytest.raises(jrc.BudgetError) as error:
        jrc.plan(fused_chain, jnp.ones((64, 64)), budget=1000)
    other = pickle.loads(pickle.dumps(error.value))
    assert str(other) == str(error.value) and other.plan == error.value.plan
    assert other.least_bytes == error.value.least_bytes
