"""What the planner assumes of compilers: arrays in tiles, and what is written to memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jrc._jaxpr import Program, nbytes
from jrc.remat._planner.costs.compilers import CPU, compiler_on
from jrc.remat._planner.costs.working_bytes import working_bytes
from jrc.remat._planner.search.peaks import Peaks
from tests.remat.planner.problems import compiled_peaks, lean_of, problem_of


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mixed_widths(params, x):
    """Functions with several readers are written; arithmetic is computed in its readers."""
    for up, down in params:
        x = jax.nn.gelu(x @ up) @ down
    return jnp.sum(x**2)


MIXED = [(array(32, 128), array(128, 32))] * 4, array(1024, 32)


@pytest.mark.parametrize(
    ("aval", "on_tpu"),
    [
        (array(), 4),
        (array(1000), 4000),
        (array(4096, 1), 4096 * 4),
        (array(100, 100), 104 * 128 * 4),
        (array(2, 100), 2 * 128 * 4),
        (array(64, 8, 32, 512), 64 * 8 * 32 * 512 * 4),
        (array(512, 8, 40), 512 * 8 * 40 * 4),
        (array(100, 100, dtype=jnp.bfloat16), 112 * 128 * 2),
        (array(100, 100, dtype=jnp.int8), 128 * 128),
        (array(0, 8), 0),
    ],
    ids=lambda value: getattr(value, "str_short", lambda: None)(),
)
def test_a_tpu_pads_the_two_axes_that_it_tiles(aval, on_tpu):
    aval = jax.core.ShapedArray(aval.shape, aval.dtype)
    assert compiler_on("tpu").array_bytes(aval) == on_tpu
    assert compiler_on("gpu").array_bytes(aval) == aval.size * aval.dtype.itemsize


def test_an_unknown_platform_is_taken_for_a_cpu():
    assert compiler_on("other") is compiler_on("cpu")
    assert compiler_on("rocm") is compiler_on("cuda") is compiler_on("gpu")


def test_accelerators_write_no_elementwise_results():
    """Of the plan that recomputes least a CPU saves each gelu too, an accelerator products."""
    peaks = {}
    for platform in ("cpu", "gpu", "tpu"):
        front = problem_of(mixed_widths, MIXED, platform=platform).front
        peaks[platform] = min((each.cost, each.peak) for each in front)[1]
    assert peaks["cpu"] > peaks["gpu"] >= peaks["tpu"] > 0


@pytest.mark.parametrize(("platform", "arrays"), [("tpu", 1), ("gpu", 2)])
def test_a_tpu_computes_the_cotangent_of_logits_where_products_read_it(platform, arrays):
    """XLA has a `select` there for TPUs; for GPUs a `scatter`, beside the logits."""

    def loss(params, x, labels):
        hidden, head, bias = params
        logits = jax.nn.gelu(x @ hidden) @ head + bias[None]
        chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    params = array(64, 64), array(64, 8192), array(8192)
    args = params, array(1024, 64), array(1024, dtype=jnp.int32)
    problem = problem_of(loss, args, platform=platform)
    least = min(each.peak for each in (*problem.front, *problem.manual))
    assert round(least / (1024 * 8192 * 4), 1) == arrays


def halved(fn, *args, platform="tpu"):
    """Equations of a function whose results take half of their bytes, beside the total of those."""
    program, compiler = Program(jax.make_jaxpr(fn)(*args)), compiler_on(platform)
    results = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    half = [v for v in results if compiler.value_bytes(program, v) < nbytes(v.aval)]
    assert all(2 * compiler.value_bytes(program, v) == nbytes(v.aval) for v in half)
    return [results[v].primitive.name for v in half]


SQUARES = array(128, 128), array(128, 128)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda w, x: jnp.sin(x @ w) @ w, ["sin"]),
        (lambda w, x: jnp.sin(x @ w).T.reshape(64, 256) @ x[:2].T.reshape(256, 1), None),
        (lambda w, x: (y := jnp.sin(x @ w)) @ w + y, []),
        (lambda w, x: ((y := jnp.sin(x @ w)) @ w, y), []),
        (lambda w, x: jnp.sin(x).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), ["sin"]),
        (lambda w, x: jnp.matmul(jnp.sin(x), w, precision="highest"), []),
        (lambda w, x: jnp.matmul(jnp.sin(x), w, precision="default"), ["sin"]),
        (lambda w, x: jnp.matmul(jnp.sin(x), w, precision=("default", "highest")), []),
        (lambda w, x: jnp.sin(x), []),
    ],
)
def test_what_products_alone_read_is_bfloat16_on_a_tpu(fn, expected):
    found = halved(fn, *SQUARES)
    if expected is None:
        assert set(found) == {"sin", "transpose", "reshape", "slice"}
    else:
        assert found == expected
    assert halved(fn, *SQUARES, platform="gpu") == halved(fn, *SQUARES, platform="cpu") == []


def test_what_a_derivative_reads_besides_is_no_bfloat16():
    """A tanh reads its result when it is differentiated, and a sine does not."""

    def loss(params, x, function):
        for w in params:
            x = function(x @ w)
        return jnp.sum(x @ params[0])

    sizes = {}
    for function in (jnp.tanh, jnp.sin):
        args = [array(128, 128)] * 3, array(1024, 128)
        problem = problem_of(functools.partial(loss, function=function), args, platform="tpu")
        graph = problem.graphs[problem.function.traced.program.jaxpr]
        sizes[function] = list(graph.sizes)
    whole = 4 * 1024 * 128
    assert sizes[jnp.tanh] == [whole] * 7 + [4]
    assert sizes[jnp.sin] == [whole, whole // 2] * 3 + [whole, 4]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_prediction_is_the_solvers_own(platform):
    problem = problem_of(mixed_widths, MIXED, platform=platform)
    peaks = Peaks(problem)
    for option in problem.options:
        assert peaks.predicted(option) == problem.own + option.peak


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_on_accelerators_regions_recompute_something_dear(platform):
    """A region of elementwise values alone would write the cotangent in front of it."""
    problem = problem_of(mixed_widths, MIXED, platform=platform)
    program, compiler = problem.function.traced.program, compiler_on(platform)
    seen = 0
    for option in (*problem.front, lean_of(problem)):
        for region in option.stages.regions:
            eqns = [program.eqns[program.steps[p]] for p in region.recomputed]
            assert not all(map(compiler.fuses, eqns))
            seen += 1
    assert seen


@pytest.mark.parametrize(
    ("platform", "without"), [("cpu", "none"), ("gpu", "kernels"), ("tpu", "chains")]
)
def test_saved_products_stand_behind_a_barrier_on_cpus_alone(platform, without):
    problem = problem_of(mixed_widths, MIXED, platform=platform)
    saving = [each for each in problem.front if any(r.saved for r in each.stages.regions)]
    decision = saving[-1].stages
    assert decision.without_barrier == without

    def barriers(each):
        return str(problem.function.gradient(each)).count("optimization_barrier")

    with_all = dataclasses.replace(decision, without_barrier="none")
    with_few = dataclasses.replace(decision, without_barrier="kernels")
    assert barriers(with_few) < barriers(with_all)


def test_a_large_vocabulary_is_predicted_as_it_is_compiled():
    """Beside the exponentials of the logits lies the cotangent that a scatter makes."""

    def loss(params, x, labels):
        logits = jax.nn.gelu(x @ params[0]) @ params[1]
        chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    args = (array(64, 64), array(64, 4096)), array(512, 64), array(512, dtype=jnp.int32)
    problem = problem_of(loss, args)
    compiled, peaks = compiled_peaks(problem), Peaks(problem)
    for option in (problem.front[0], problem.baseline):
        assert peaks.predicted(option) == pytest.approx(compiled(option), rel=0.15)


def test_a_constant_result_takes_no_working_bytes():
    jaxpr = jax.make_jaxpr(lambda x: (x @ x, 0.0))(jnp.ones((8, 8)))
    assert working_bytes(Program(jaxpr), CPU) == 256
