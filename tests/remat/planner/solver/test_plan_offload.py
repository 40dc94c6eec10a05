"""`offload=`: saved values of loops in the host's memory. CPU devices stand in for accelerators."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jrc
from jrc._targets import accelerator
from jrc.remat import plan_for_each
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.costs.cost_unit import FlopUnit
from jrc.remat._planner.search.problem import Problem
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver import constructs
from jrc.remat._planner.solver.offload import waiting_seconds, with_offloaded
from jrc.remat._planner.solver.solver import solve

SHAPE = jax.ShapeDtypeStruct
ARGS = ({"a": SHAPE((4, 16, 64), "float32"), "b": SHAPE((4, 64, 16), "float32")},
        SHAPE((128, 16), "float32"))  # fmt: skip
FAST = 1e18


def block(x, w):
    x = checkpoint_name(x, "into")
    h = checkpoint_name(x @ w["a"], "hidden")
    return x + jax.nn.gelu(h) @ w["b"], None


def net(params, x):
    layers = {name: params[name] for name in ("a", "b")}
    return jnp.mean(jax.lax.scan(block, x, layers)[0] ** 2)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(
        accelerator, "compile_only_devices", lambda named: tuple(jax.devices()[-1:])
    )


planned = functools.partial(jrc.plan, net, *ARGS, target="h100", verify=False)


def test_what_the_host_has_is_no_part_of_a_predicted_peak():
    plan = planned(offload=FAST, budget=0.0)
    lean = planned(budget=0.0)
    assert plan.predicted.host_bytes > 2 * plan.predicted.peak_bytes
    assert plan.predicted.peak_bytes <= lean.predicted.peak_bytes
    least = next(each for each in plan.candidates if each.name == "leanest with nothing moved")
    assert 0.5 < least.predicted.peak_bytes / lean.predicted.peak_bytes < 2


def on_host(plan):
    return [each.name.partition(",")[0] for each in plan.kept if each.name.endswith("on the host")]


def a_step():
    """Three products in a row, 4 FLOPs each; each derivative reads its operand of 8 bytes."""
    nodes = [CostNode(-1, (0,), runs_once=True)]
    for k in range(3):
        reads = frozenset({k})
        nodes.append(CostNode(k, (k + 1,), (k,), reads, cost=4, active=True))
    names = ((-1, 0), (0, 0), (1, 0), (2, 0))
    sizes, unit = (8,) * 4, FlopUnit(rate=1.0)
    return CostGraph(tuple(nodes), sizes, sizes, (0,) * 4, (True,) * 4, names, unit=unit)


@pytest.mark.parametrize(
    "reads, waits",
    [
        # 8 bytes take 8 s, a product 4 s, its derivative 8 s: all copies are made in time but the
        # last, which is made 4 s before the end of the forward pass, and read first.
        ({0: [(1, 1)]}, 0),
        ({1: [(2, 2)]}, 0),
        ({2: [(3, 3)]}, 4 + 8),
        # Copies follow one another: forth until 8, 16 and 24 s, of 12; back by 8, 16 and 24 s, when
        # they are read at 0, 16 and 24.
        ({0: [(1, 1)], 1: [(2, 2)], 2: [(3, 3)]}, 12 + 8),
        # What two regions read is copied twice: forth until 16 s; back at 8 and at 16 s.
        ({0: [(1, 1), (3, 3)]}, 4 + 8),
    ],
)
def test_a_step_waits_for_what_it_does_not_hide(reads, waits):
    rate = 1
    assert waiting_seconds(a_step(), [False] * 4, reads, rate) == waits


def test_recomputed_values_give_copies_time():
    # Values 1 and 2 are recomputed, 8 s; the region's copy is read when that begins.
    recomputed = [False, True, True, False]
    rate = 1
    assert waiting_seconds(a_step(), recomputed, {0: [(1, 3)]}, rate) == 8
    assert waiting_seconds(a_step(), recomputed, {0: [(1, 1)]}, rate) == 0


@pytest.mark.parametrize("bandwidth, moves", [(100.0, True), (0.01, False)])
def test_the_cheaper_of_both_is_taken(bandwidth, moves):
    graph = a_step()
    front = solve(graph, {}, 10)
    found = with_offloaded(graph, {}, front, 10, [True] * 4, bandwidth)
    least = min(found, key=lambda each: each.peak)
    # One step recomputes two products, 8 FLOPs, or waits 24 bytes at least.
    assert least.stages.offloaded and least.host in (80, 160, 240)
    cheap = min((each for each in found if each.saved <= 80), key=lambda each: each.cost)
    assert bool(cheap.stages.offloaded) is moves
    assert cheap.cost == (pytest.approx(0, abs=20) if moves else 80)
    kept = {dataclasses.replace(each.stages, offloaded=()) for each in found}
    assert kept == {each.stages for each in front}


@pytest.fixture(scope="module")
def fast():
    """The plans of a fast link for three budgets; the middle one moves values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "compile_only_devices", lambda *_: tuple(jax.devices()[-1:]))
        budgets = (0.0, "300KiB", "64MiB")
        return plan_for_each(net, *ARGS, budgets=budgets, target="h100", verify=False, offload=FAST)


def test_a_fast_link_moves_and_a_slow_one_recomputes(fast):
    lean, some, free = fast
    slow, none = (planned(budget="300KiB", offload=rate) for rate in (1e3, False))
    assert some.predicted.host_bytes > 0 and "into" in on_host(some)
    assert some.predicted.flops < none.predicted.flops
    assert not slow.predicted.host_bytes and not on_host(slow)
    assert slow.decision == none.decision
    # What fits without is left alone.
    assert lean.predicted.host_bytes >= some.predicted.host_bytes and not free.reruns


def test_a_plan_with_offload_is_a_value(fast):
    plan = fast[1]
    assert jrc.Plan.from_json(plan.to_json()) == plan
    text = str(plan)
    assert "saved in the host's memory: " in text and "hidden, on the host" in text
    assert any(each.cost.host_bytes for each in plan.candidates) and " host" in text
    assert not any(each.cost.host_bytes for each in plan.candidates if each.name)


def check_gradients(plan):
    rng = np.random.default_rng(0)
    params, x = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 8, s.dtype), ARGS)
    lean = plan.apply(net)
    want, found = (jax.jit(jax.grad(fn))(params, x) for fn in (net, lean))
    for key in want:
        scale = np.abs(want[key]).max()
        np.testing.assert_allclose(found[key], want[key], atol=1e-6 * scale, rtol=0)
    report = jrc.explain(lean, params, x)
    moved = {v.mark for v in report.saved if v.memory == "pinned_host" and v.mark}
    assert moved and moved == set(on_host(plan)) & {"into", "hidden"}
    assert " in pinned_host" in str(report)


def test_gradients_are_the_same_and_values_are_on_the_host(fast):
    check_gradients(fast[1])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="this JAX has one remat")
def test_jaxs_next_remat_moves_them_too():
    jax.config.update("jax_remat3", True)
    try:
        check_gradients(planned(budget="300KiB", offload=FAST))
    finally:
        jax.config.update("jax_remat3", False)


@pytest.mark.slow
def test_names_and_policy_say_what_is_moved():
    def wrapped(params, x, policy=None):
        step = jax.checkpoint(lambda x, w: block(x, w), policy=policy)
        return jnp.mean(jax.lax.scan(step, x, params)[0] ** 2)

    plan = jrc.plan(wrapped, *ARGS, target="h100", verify=False, budget="300KiB", offload=FAST)
    host = plan.names(approximate=True, memory="pinned_host")
    assert host and set(host) <= {"into", "hidden"}
    assert not set(host) & set(plan.names(approximate=True))
    policy = plan.policy(approximate=True)
    text = str(jax.make_jaxpr(jax.grad(functools.partial(wrapped, policy=policy)))(*ARGS))
    assert "<host>" in text
    with pytest.raises(ValueError, match="memory must be one of"):
        plan.names(memory="moon")


@pytest.mark.slow
def test_a_flat_program_moves_nothing():
    def flat(params, x):
        for k in range(4):
            x, _ = block(x, jax.tree.map(lambda w: w[k], params))  # noqa: B023
        return jnp.mean(x**2)

    both = [
        jrc.plan(flat, *ARGS, target="h100", verify=False, budget=0.0, offload=rate)
        for rate in (False, FAST)
    ]
    assert both[0].decision == both[1].decision and not both[1].predicted.host_bytes


@pytest.mark.slow
def test_branches_stay_on_the_device():
    def loss(params, x):
        return jax.lax.cond(x[0, 0] > 0, net, lambda p, x: 2 * net(p, x), params, x)

    plan = jrc.plan(loss, *ARGS, target="h100", verify=False, budget=0.0, offload=FAST)
    assert not plan.predicted.host_bytes


@pytest.mark.slow
def test_the_largest_batch_is_looked_for_with_the_host_too(monkeypatch):
    """Nothing moves on the CPU that stands in, so that bytes on the host count there."""
    rates = []

    def recorded(request):
        rates.append(request.copy_bandwidth)
        return problem_of(request)

    problem_of = Problem.of
    monkeypatch.setattr(Problem, "of", recorded)
    batch = lambda n: (ARGS[0], SHAPE((n, 16), "float32"))  # noqa: E731
    options = {"target": "h100", "multiple_of": 64, "most": 128}
    found = jrc.largest_batch(batch, net, 830_000, offload=FAST, **options)
    # One problem is for the leanest plan of a batch, and one for the plan.
    assert len(rates) >= 2 and set(rates) == {FAST}
    assert any(each.predicted.host_bytes for each in found.plan.candidates)
    assert (found.plain, found.recomputed) == (64, 128) and found.plan.compilations <= 6


def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match=r"offload must be used .* got a CPU, .* target='h100'"):
        jrc.plan(net, *ARGS, budget=0.5, offload=True)
    with pytest.raises(ValueError, match="'tpu7x:2x2x1'. Pass what copies reach there"):
        jrc.plan(net, *ARGS, budget=0.5, offload=True, target="tpu7x:2x2x1")
    with pytest.raises(TypeError, match="offload must be a bool, or the bytes per second .* str"):
        planned(budget=0.5, offload="yes")
    with pytest.raises(ValueError, match="offload must be a positive number"):
        planned(budget=0.5, offload=-1.0)
    with pytest.raises(ValueError, match="offload must go with memory_budget"):
        jrc.make_train_step(net, optax.sgd(0.1), offload=True)


def test_a_program_of_too_much_work_still_has_a_plan(monkeypatch, caplog):
    def long_net(params, x):
        for w in params["w"]:
            x = jnp.tanh(x @ w)
        return net(params, x)

    params = ARGS[0] | {"w": [SHAPE((16, 16), "float32")] * 24}
    few = dataclasses.replace(SETTINGS, label_steps=60)
    monkeypatch.setattr(constructs, "solve", functools.partial(solve, settings=few))
    options = {"target": "h100", "verify": False, "offload": FAST, "budget": 0.0}
    plan = jrc.plan(long_net, params, ARGS[1], **options)
    assert "too much work" in caplog.text
    assert any(each.name == "leanest with nothing moved" for each in plan.candidates)


def test_names_on_the_host_are_in_program_order():
    @jax.checkpoint
    def named(x, w):
        for name in "abcdef":
            x = checkpoint_name(jnp.tanh(x @ w), name)
        return x, None

    def loss(ws, x):
        return jnp.mean(jax.lax.scan(named, x, ws)[0] ** 2)

    args = SHAPE((4, 64, 64), "float32"), SHAPE((512, 64), "float32")
    options = {"target": "h100", "verify": False, "offload": FAST, "budget": 0.0}
    names = jrc.plan(loss, *args, **options).by_name.offloaded
    assert len(names) > 1 and list(names) == sorted(names)
