"""`minimize=` and `measure=`: plans of the least seconds, predicted, compiled and measured."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from jrc._jaxpr import inner_program
from jrc._targets.chips import CHIPS
from jrc.remat._chunks.chunks import Chunks
from jrc.remat._planner.costs.compilers import CPU, GPU, TPU, Compiler
from jrc.remat._planner.costs.cost_unit import TimeUnit
from jrc.remat._planner.search.compiled_cost import CompiledCost
from jrc.remat._planner.search.model_errors import ModelErrors
from jrc.remat._planner.search.problem import Problem, Request
from jrc.remat._planner.search.search import Search
from jrc.remat._planner.solver.option import Option
from jrc.remat._time import host_rates as host_rates_file
from jrc.remat._time.host_rates import host_rates, measured
from jrc.remat._time.rates import Rates, rates_of_chip

RATES = Rates(
    products=1e9,
    convolutions=1e8,
    functions=1e6,
    bandwidth=1e6,
    launch=0.5,
    new_memory=1e5,
    slow_convolutions=1e7,
    strided=1e7,
)
ON_CPU, ON_GPU, ON_TPU = (TimeUnit(RATES, compiler) for compiler in (CPU, GPU, TPU))
X = jnp.ones((100, 1000))


def seconds(unit, fn, *args):
    return unit.seconds(unit.total(jax.make_jaxpr(fn)(*args).jaxpr))


def test_a_product_takes_its_flops_or_its_bytes():
    wide = jnp.ones((1000, 5000))
    assert seconds(ON_GPU, jnp.dot, X, wide) == pytest.approx(
        max(2 * 100 * 1000 * 5000 / 1e9, 4 * (100_000 + 5_000_000 + 500_000) / 1e6) + 0.5
    )
    fast = TimeUnit(dataclasses.replace(RATES, bandwidth=1e12), GPU)
    assert seconds(fast, jnp.dot, X, wide) == pytest.approx(2 * 100 * 1000 * 5000 / 1e9 + 0.5)


def test_a_convolution_has_a_rate_of_its_own():
    image, kernel = jnp.ones((1, 4, 32, 32)), jnp.ones((8, 4, 3, 3))
    fast = TimeUnit(dataclasses.replace(RATES, bandwidth=1e12), GPU)
    conv = lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME")  # noqa: E731
    assert seconds(fast, conv, image, kernel) == pytest.approx(
        2 * 8 * 32 * 32 * 4 * 9 / 1e8 + 0.5, rel=1e-4
    )


def test_convolutions_in_loops_on_a_cpu_are_slow_but_where_channels_are_last():
    """XLA for CPUs gives convolutions the form of its library outside of loops alone."""
    rates = dataclasses.replace(RATES, bandwidth=1e12, slow_convolutions=1e6)
    unit, times = TimeUnit(rates, CPU), 3
    first = jnp.ones((times, 4, 32, 32)), jnp.ones((8, 4, 3, 3)), ("NCHW", "OIHW", "NCHW")
    last = jnp.ones((times, 32, 32, 4)), jnp.ones((3, 3, 4, 8)), ("NHWC", "HWIO", "NHWC")
    for images, kernel, numbers in (first, last):

        def conv(x, k, numbers=numbers):
            return jax.lax.conv_general_dilated(
                x[None], k, (1, 1), "SAME", dimension_numbers=numbers
            )

        def gradient(x, k, conv=conv):
            return jax.grad(lambda k: jnp.sum(conv(x, k)))(k)

        flops = 2 * 8 * 32 * 32 * 4 * 9
        for fn, is_slow in ((conv, numbers[0] == "NCHW"), (gradient, True)):
            alone = seconds(unit, fn, images[0], kernel)
            looped = seconds(
                unit, lambda xs, k, fn=fn: jax.lax.map(lambda x: fn(x, k), xs), images, kernel
            )
            assert alone == pytest.approx(flops / 1e8 + 0.5, rel=2e-2)
            once = flops / (1e6 if is_slow else 1e8) + 0.5
            assert looped == pytest.approx(times * once, rel=2e-2)


@pytest.mark.slow
def test_convolutions_run_in_chunks_where_they_are_not_slow(monkeypatch):
    def convnet(ks, x):
        for k in ks:
            x = jnp.tanh(jax.lax.conv(x, k, (1, 1), "SAME"))
        return jnp.mean(x**2)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    args = [shape((8, 8, 3, 3))] * 4, shape((16, 8, 32, 32))
    plans = []
    for slow, most_in_turn in ((math.inf, 0), (1e8, 0), (1e8, 16)):
        monkeypatch.setattr(type(CPU), "most_in_turn", most_in_turn)
        rates = dataclasses.replace(host_rates(), slow_convolutions=slow, new_memory=1e8)
        for place in ("seconds", "host_rates"):
            monkeypatch.setattr(f"jrc.remat._time.{place}.host_rates", lambda rates=rates: rates)
        plans.append(jrc.plan(convnet, *args, budget="100%"))
    fast, slow, in_turn = plans
    assert fast.chunks and not slow.chunks
    assert in_turn.chunks and all(each.are_in_turn for each in in_turn.chunks)
    assert slow.verified.peak_bytes <= slow.budget


def test_what_is_fused_takes_its_operations_and_on_a_cpu_its_bytes():
    assert seconds(ON_GPU, jnp.tanh, X) == pytest.approx(100_000 / 1e6)
    assert seconds(ON_CPU, jnp.tanh, X) == pytest.approx(400_000 / 1e6)
    # Arithmetic is eight times as fast, and is fused on CPUs too.
    assert seconds(ON_CPU, jnp.add, X, X) == pytest.approx(100_000 / 8e6)


def test_rows_are_reduced_in_the_kernel_that_reads_them_on_accelerators():
    total = lambda x: jnp.sum(x, -1)  # noqa: E731
    assert seconds(ON_GPU, total, X) == pytest.approx(100_000 / 8e6)
    assert seconds(ON_TPU, total, X) == pytest.approx(100_000 / 8e6)
    columns = lambda x: jnp.sum(x, 0)  # noqa: E731
    assert seconds(ON_GPU, columns, X) == pytest.approx((400_000 + 4_000) / 1e6 + 0.5)


def test_narrow_values_take_whole_words_on_a_tpu():
    """A transposed array is read and written; TPUs reach 0.8 of the bandwidth."""
    for dtype, words in ((jnp.float32, 1), (jnp.bfloat16, 1), (jnp.int8, 1), (jnp.complex64, 2)):
        x = X.astype(dtype)
        assert seconds(ON_TPU, lambda x: jnp.sum(x, 0), x) > 4e5 * words / 0.8 / 1e6
        assert TPU.moved_bytes(x) == pytest.approx(4e5 * words / 0.8)
        assert GPU.moved_bytes(x) == x.nbytes


@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_saving_what_a_kernel_writes_costs_nothing(target):
    """A cast of a product is written with it; what else is saved is written for itself."""

    def loss(w, x):
        for _ in range(12):
            x = (x @ w).astype(jnp.bfloat16).astype(jnp.float32)
            x = 1 + jnp.tanh(x)
        return jnp.sum(x)

    shape = jax.ShapeDtypeStruct
    args = shape((128, 128), "float32"), shape((1024, 128), "float32")
    request = Request(loss, args, target=target, platform=CHIPS[target].platform, minimize="time")
    problem = Problem.of(request)
    program = problem.function.traced.program
    graph = problem.graphs[program.jaxpr]
    eqns = [program.eqns[program.steps[p]] for p, _ in graph.names]
    casts = [v for v, eqn in enumerate(eqns) if eqn.outvars[0].aval.dtype == jnp.bfloat16]
    waves = [v for v, eqn in enumerate(eqns) if eqn.primitive.name == "tanh"]
    assert casts and not any(graph.saving_costs[v] for v in casts)
    assert waves and all(graph.saving_costs[v] for v in waves[:-1])


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_saving_a_sum_of_rows_splits_a_kernel_that_reads_the_rows_again(target, in_loop):
    """On a GPU that of a softmax whose result is read; the logarithm of a sum is one by itself."""

    def softmax(x, w):
        return jax.nn.softmax(x, -1) @ w, None

    def logarithm(x, w):
        x = x @ w
        return x, jnp.log(jnp.sum(jnp.exp(x), -1))

    def loss(fn, ws, x):
        if in_loop:
            x, found = jax.lax.scan(fn, x, ws)
        else:
            for w in ws:
                x, found = fn(x, w)
        return jnp.sum(x) + (0 if found is None else jnp.sum(found))

    shape = jax.ShapeDtypeStruct
    args = shape((3, 1024, 1024), "float32"), shape((4096, 1024), "float32")
    costs = {}
    for fn in (softmax, logarithm):
        request = Request(
            functools.partial(loss, fn), args, target=target, platform=CHIPS[target].platform,
            minimize="time",
        )  # fmt: skip
        problem = Problem.of(request)
        graphs = problem.graphs.values()
        graph = max(graphs, key=lambda graph: sum(graph.sizes)) if in_loop else [*graphs][-1]
        made = [v for node in graph.nodes for v in node.makes if graph.may_save[v]]
        costs[fn] = [graph.saving_costs[v] for v in made if graph.sizes[v] == 4 * 4096]
    of_wide = problem.unit.of_bytes(4 * 4096 * 1024)
    # In a loop a kernel of its own writes the sum.
    of_narrow = of_wide / 100 + in_loop * problem.unit.of_written(0)
    assert costs[softmax] and costs[logarithm] and max(costs[logarithm]) < of_narrow
    if target == "h100":
        assert min(costs[softmax]) > of_wide
    else:  # the sum is written in any case: a product reads the rows again
        assert max(costs[softmax]) < of_narrow


def test_what_moves_data_reads_what_it_writes():
    row = lambda x: jax.lax.dynamic_slice(x, (3, 0), (1, 1000))  # noqa: E731
    assert seconds(ON_GPU, row, X) == pytest.approx(2 * 4000 / 1e6 + 0.5, rel=1e-2)


def test_a_concatenation_launches_no_kernel_on_accelerators():
    roll = lambda x: jnp.concatenate([x[1:], x[:1]])  # noqa: E731
    written = 4 * X.size / 1e6
    assert seconds(ON_GPU, roll, X) == seconds(ON_TPU, roll, X) * 0.8 == pytest.approx(written)
    assert seconds(ON_CPU, roll, X) == pytest.approx(2 * written + 0.5, rel=0.02)


def test_a_loop_takes_the_time_of_all_its_steps():
    def loop(x):
        return jax.lax.scan(
            lambda c, _: (jnp.sum(c, 0, keepdims=True) * c, None), x, None, length=7
        )[0]

    (eqn,) = (e for e in jax.make_jaxpr(loop)(X).jaxpr.eqns if e.primitive.name == "scan")
    assert ON_GPU.of(eqn) == 7 * ON_GPU.total(inner_program(eqn))


def test_rates_of_a_chip_know_the_dtype():
    rates = rates_of_chip(CHIPS["h100"])
    unit = TimeUnit(
        dataclasses.replace(rates, bandwidth_of_products=math.inf, latency_of_products=0.0), GPU
    )
    low, high = (
        seconds(unit, jnp.dot, *[jnp.ones((2048, 2048), dtype)] * 2) - rates.launch
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert high == pytest.approx(2 * low, rel=1e-3)


class Timed:
    """Peaks that are exact, and seconds that are predicted and compiled apart."""

    own, is_inside, are_costs_exact = 0, False, False
    errors = Compiler.peak_errors, Compiler.time_errors

    def __init__(self, rows):
        self.options = [Option(peak, 0, cost, family=kind) for peak, cost, _, kind in rows]
        self._compiled = dict(zip(self.options, (row[2] for row in rows), strict=True))

    def predicted(self, option):
        return option.peak

    def predicted_cost(self, option):
        return option.cost

    def compiled_cost(self, option):
        return self._compiled[option]

    def compiled(self, option):
        return CompiledCost(0, 0, option.peak, 0)


def test_the_fastest_compiled_program_is_taken_and_not_the_fastest_predicted_one():
    known = Timed(
        [
            (100, 1_000_000, 1_300_000, "baseline"),
            (60, 1_010_000, 900_000, "solver"),
            (20, 1_500_000, 1_400_000, "solver"),
        ]
    )
    search = Search(known.options, known, 3)
    assert search.cheapest_fitting(1000) is known.options[1]
    assert search.fitting(1000)[0] is known.options[1] and search.fitting(50) == []


def test_the_baseline_is_taken_where_others_gain_nearly_nothing():
    rows = [(100, 1_000_000, 1_000_000, "baseline"), (60, 1_001_000, 999_000, "solver")]
    known = Timed(rows)
    search = Search(known.options, known, 2)
    assert search.cheapest_fitting(1000).is_baseline


def net(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


NET = ([jnp.asarray(np.full((64, 64), np.float32(1 / 64)))] * 6, jnp.ones((2048, 64)))


def test_seconds_count_and_are_stated():
    by_time, by_flops = (jrc.plan(net, *NET, budget=1.0, minimize=m) for m in ("time", "flops"))
    assert (by_time.minimize, by_flops.minimize) == ("time", "flops")
    for cost in (by_time.predicted, by_time.verified):
        assert cost.seconds > 0 and cost.seconds_from == "modelled"
    assert by_flops.verified.seconds is None and not by_flops.reruns
    compiled = [each for each in by_time.candidates if each.verified]
    assert by_time.verified.seconds <= 1.01 * min(each.verified.seconds for each in compiled)
    assert "time " in str(by_time) and jrc.Plan.from_json(by_time.to_json()) == by_time


def test_memory_that_is_new_in_each_run_makes_a_lean_program_the_faster_one(monkeypatch):
    """The baseline fits, and needs several times the bytes."""
    rates = dataclasses.replace(host_rates(), new_memory=1e7)
    monkeypatch.setattr("jrc.remat._time.seconds.host_rates", lambda: rates)
    plan = jrc.plan(net, *NET, budget=1.0, chunks=False)
    free = jrc.plan(net, *NET, budget=1.0, minimize="flops")
    assert plan.reruns and plan.verified.peak_bytes < 0.8 * free.verified.peak_bytes
    kept = dataclasses.replace(rates, new_memory=math.inf)
    monkeypatch.setattr("jrc.remat._time.seconds.host_rates", lambda: kept)
    assert jrc.plan(net, *NET, budget=1.0).verified.flops_ratio < 1.01


def test_without_a_budget_it_is_the_memory_of_the_machine():
    plan = jrc.plan(net, *NET)
    assert plan.budget > 2**28 and plan.verified.peak_bytes < plan.budget


def test_measured_programs_are_run():
    plan = jrc.plan(net, *NET, budget=0.5, measure=True, compilations=2)
    assert plan.verified.seconds_from == "measured" and plan.verified.seconds > 0
    sources = {each.verified.seconds_from for each in plan.candidates if each.is_chosen}
    assert sources == {"measured"} and "(measured)" in str(plan) and " ~" in str(plan)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"minimize": "bytes"}, "minimize must be"),
        ({"measure": True, "target": "h100"}, "measure=True must be used with programs that can"),
        ({"measure": True, "verify": False}, "got verify=False. Leave one of the two out"),
        ({"measure": True, "minimize": "flops"}, "got minimize='flops'"),
    ],
)
def test_what_does_not_go_together(options, said):
    with pytest.raises(ValueError, match=said):
        jrc.plan(net, *NET, budget=0.5, **options)


def test_programs_of_shapes_or_of_deleted_arrays_are_not_run():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), NET)
    with pytest.raises(ValueError, match="got a jax.ShapeDtypeStruct"):
        jrc.plan(net, *shapes, budget=0.5, measure=True)
    gone = jnp.ones((64, 64))
    gone.delete()
    with pytest.raises(ValueError, match="got a deleted array"):
        jrc.plan(net, [gone], NET[1], budget=0.5, measure=True)


@pytest.mark.slow
def test_a_plan_of_other_rates_is_another_one_in_the_cache(monkeypatch, tmp_path):
    first = jrc.plan(net, *NET, budget=0.5, cache=tmp_path)
    slow = dataclasses.replace(host_rates(), products=1e6, bandwidth=1e6)
    for place in ("seconds", "host_rates"):
        monkeypatch.setattr(f"jrc.remat._time.{place}.host_rates", lambda: slow)
    monkeypatch.setattr("jrc.remat._planner.make_plan.host_rates", lambda: slow)
    again = jrc.plan(net, *NET, budget=0.5, cache=tmp_path)
    assert again.verified.seconds > 10 * first.verified.seconds


@pytest.mark.slow
def test_the_batch_of_most_examples_a_second():
    def make_args(batch):
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in NET[0]], jax.ShapeDtypeStruct(
            (batch, 64), jnp.float32
        )

    found = jrc.largest_batch(make_args, net, "4MB", multiple_of=64)
    per_second = found.recomputed / found.plan.verified.seconds
    assert found.fastest.per_second >= 0.999 * per_second
    assert 0 < found.fastest.batch <= found.recomputed and "examples a second" in str(found)


def test_a_report_has_the_seconds_of_its_program():
    report = jrc.explain(net, *NET)
    assert report.time.value > 0 and report.time.source == "modelled"
    assert jrc.Report.from_json(report.to_json()) == report
    assert "\ntime " in str(report) and "time" in report.compare(report)


@pytest.fixture
def no_rates(monkeypatch, tmp_path):
    """No rates are known, and the folder for them is an empty one."""
    monkeypatch.delenv("JRC_HOST_RATES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(host_rates_file, "measured", lambda: RATES)
    return tmp_path


@pytest.mark.parametrize("bandwidth", [1e6, {2**9: 4e6, 2**20: 1e6}])
def test_rates_are_measured_once_and_kept(no_rates, monkeypatch, bandwidth):
    rates = dataclasses.replace(RATES, bandwidth=bandwidth)
    monkeypatch.setattr(host_rates_file, "measured", lambda: rates)
    assert host_rates.__wrapped__() == rates
    (path,) = no_rates.glob("jrc/*.json")
    assert json.loads(path.read_text())["launch"] == 0.5
    monkeypatch.setattr(host_rates_file, "measured", lambda: pytest.fail("measured again"))
    assert host_rates.__wrapped__() == rates


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not JSON"])
def test_a_file_that_is_no_rates_is_written_anew(no_rates, text):
    path = host_rates_file._path()
    path.parent.mkdir()
    path.write_text(text)
    assert host_rates.__wrapped__() == RATES
    assert json.loads(path.read_text())["launch"] == 0.5


def test_a_folder_that_cannot_be_written_is_left_alone(no_rates):
    (no_rates / "jrc").write_text("a file")
    assert host_rates.__wrapped__() == RATES


def test_without_a_home_they_are_measured_alone(no_rates, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert host_rates.__wrapped__() == RATES


@pytest.mark.parametrize(
    "field, value",
    [
        ("products", 0),
        ("bandwidth", -1.0),
        ("launch", "x"),
        ("strided", {}),
        ("strided", {"many": 1e6}),
        ("strided", {"64": [1e6]}),
    ],
)
@pytest.mark.parametrize("constant", [None, float("inf"), float("nan")])
def test_a_named_file_without_rates_is_refused(monkeypatch, tmp_path, field, value, constant):
    data = dataclasses.asdict(RATES)
    for each in ("by_dtype", "bandwidth_of_products", "latency_of_products"):
        del data[each]
    path = tmp_path / "rates.json"
    monkeypatch.setenv("JRC_HOST_RATES", str(path))
    path.write_text(json.dumps(data))
    assert host_rates.__wrapped__() == RATES
    path.write_text(json.dumps(data | {field: value if constant is None else constant}))
    with pytest.raises(ValueError, match="JRC_HOST_RATES must name a file of rates"):
        host_rates.__wrapped__()


@pytest.mark.slow
def test_nothing_of_the_caller_is_in_the_measurement(monkeypatch):
    """Neither a trace, nor a mesh of eight devices, nor a guard of transfers."""
    monkeypatch.setattr(host_rates_file, "_LARGE", 2**12)
    monkeypatch.setattr(host_rates_file, "_SIDE", 32)
    monkeypatch.setattr(host_rates_file, "_ROUNDS", 1)
    seen = []
    jax.make_jaxpr(lambda x: seen.append(measured()) or x)(1.0)
    with jax.set_mesh(jax.make_mesh((8,), ("d",))), jax.transfer_guard("disallow"):
        seen.append(measured())
    assert all(0 < each.products < 1e12 for each in seen)
    with jax.transfer_guard("disallow"):
        jaxpr = jax.make_jaxpr(lambda x: (seen.append(measured()), x)[1])(1.0)
    assert not jaxpr.eqns


@pytest.mark.exhaustive
def test_the_rates_of_this_machine_are_those_of_a_machine():
    found = measured()
    assert 1e8 < found.products < 1e14 and 1e7 < found.convolutions < 1e14
    assert 1e7 < found.functions < 1e13 and 1e7 < found.new_memory < 1e14
    assert 1e6 < found.slow_convolutions < 1e14
    assert [*found.bandwidth] == [2**20, 2**23, 2**25, 2**27]
    assert all(1e8 < rate < 1e14 for rate in found.bandwidth.values())
    assert [*found.strided] == [2**18, 2**22]
    assert all(1e6 < rate < 1e14 for rate in found.strided.values())


def layers(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])


def on(target, minimize="time"):
    """The problem of three layers in a loop, for an accelerator that need not be there."""
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((3, 128, 128), (1024, 128))]
    platform = CHIPS[target].platform if target else None
    return Problem.of(
        Request(layers, tuple(shapes), target=target, platform=platform, minimize=minimize)
    )


def test_what_a_loop_saves_is_copied_into_a_stack_and_out_on_accelerators():
    """JAX stacks the carry of each step, and what the derivative of tanh reads."""
    problem = on("h100")
    rates = rates_of_chip(CHIPS["h100"])
    saved = problem.baseline.saved
    assert saved == 2 * 3 * 1024 * 128 * 4
    seconds = 2 * saved / rates.bandwidth + 2 * 3 * rates.launch
    assert problem.baseline.cost == pytest.approx(1e12 * seconds, rel=1e-6)
    assert problem.predicted_cost(problem.baseline) == problem.cost
    assert on("").baseline.cost == 0 and on("h100", "flops").baseline.cost == 0


def test_a_loop_that_is_left_to_jax_in_a_region_stacks_what_it_saves():
    problem = on("h100")
    (graph,) = (each for each in problem.graphs.values() if any(n.inner_cost for n in each.nodes))
    (loop,) = (node for node in graph.nodes if node.inner_cost)
    assert loop.inner_cost == problem.baseline.cost
    (region,) = (each for each in problem.manual if each.name == "1 region recomputed")
    assert region.cost >= loop.cost + loop.inner_cost
    (steps,) = (each for each in problem.manual if "every step" in each.name)
    assert steps.cost > loop.inner_cost  # the carry of each step, and its product


def test_temporaries_in_on_chip_memory_count_in_no_peak():
    of_v5e, of_h100 = (on(name) for name in ("v5e", "h100"))
    large = dataclasses.replace(of_v5e.baseline, peak=10 * of_v5e.on_chip)
    assert of_v5e.on_chip > of_v5e.baseline.peak and of_h100.on_chip == 0
    assert of_v5e.temporaries(of_v5e.baseline) == of_v5e.baseline.peak // 10
    assert of_v5e.temporaries(large) == 9 * of_v5e.on_chip
    # More is saved than fits on the chip: no part of it lies there.
    saving = dataclasses.replace(large, saved=int(9.5 * of_v5e.on_chip))
    assert of_v5e.temporaries(saving) == saving.saved
    regions = dataclasses.replace(saving, family="regions")
    assert of_v5e.temporaries(regions) == 9 * of_v5e.on_chip
    assert of_h100.temporaries(large) == large.peak


def test_seconds_of_programs_in_chunks_are_off_as_those_of_others():
    """One compiled program that is slow says that those with regions in chunks are slow too."""
    whole = Option(100, 0, 2)
    region = Chunks((), (0,), (), chunks=2, shape=(), dtype="float32", name="", bytes=8)
    options = [whole, dataclasses.replace(whole, chunks=(region,))]
    seconds, peaks = (
        ModelErrors(options, [100.0, 100.0], sizes).given({0: 0.5})[0][1]
        for sizes in (Compiler.time_errors, Compiler.peak_errors)
    )
    assert 0.45 < seconds < 0.5 and peaks < 0.36


def test_peaks_in_chunks_are_off_as_those_in_other_chunks():
    """What is known of a program in two chunks says more of one in four than of none in any."""
    whole = Option(100, 0, 2)
    region = Chunks((), (0,), (), chunks=2, shape=(), dtype="float32", name="", bytes=8)
    two, four = (dataclasses.replace(region, chunks=n) for n in (2, 4))
    options = [whole, *(dataclasses.replace(whole, chunks=(each,)) for each in (two, four))]
    errors = ModelErrors(options, [100.0] * 3, Compiler.peak_errors)
    (of_none, of_two, of_four), _ = errors.given({1: 0.5})
    assert 0.3 < of_none < 0.36 < 0.4 < of_four < of_two == 0.5
