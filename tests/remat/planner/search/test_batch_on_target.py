"""`jrc.largest_batch` for a target: few compilations. CPU devices stand in for accelerators."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc._targets import accelerator
from jrc.remat._gradient import compiled_memory
from jrc.remat._planner.search.largest_within import Start, largest_within, line_meets
from jrc.remat._planner.search.peaks import Peaks

WIDTH, LAYERS = 64, 8


@pytest.fixture
def compiled(monkeypatch):
    """The programs that are compiled, with CPU devices in the place of compile-only ones."""
    monkeypatch.setattr(
        accelerator, "compile_only_devices", lambda named: tuple(jax.devices()[-1:])
    )
    found, real = [], compiled_memory.compiled_to_look_at

    def counted(lowered, platform=None):
        found.append(lowered)
        return real(lowered, platform)

    monkeypatch.setattr(compiled_memory, "compiled_to_look_at", counted)
    return found


def loss(params, x, activation=jnp.square):
    block = lambda x, w: (x + activation(x @ w["a"]) @ w["b"], None)  # noqa: E731
    return jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)


def make_args(batch):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {
        "a": shape((LAYERS, WIDTH, 4 * WIDTH)),
        "b": shape((LAYERS, 4 * WIDTH, WIDTH)),
    }
    return params, shape((batch, 32, WIDTH))


def peak(fn, batch):
    lowered = jax.jit(jax.value_and_grad(fn)).lower(*make_args(batch))
    return compiled_memory.memory_needed(lowered).peak


@pytest.mark.exhaustive
@pytest.mark.parametrize(("activation", "in_chunks"), [(jnp.square, 4), (jax.nn.gelu, 9)])
def test_a_search_compiles_few_programs(compiled, activation, in_chunks):
    budget, fn = 2**26, functools.partial(loss, activation=activation)
    found = jrc.largest_batch(make_args, fn, budget, target="h100")
    # Three batches of the baseline; three of the leanest, at the first of them two more that might
    # be the leanest; those of the leanest in chunks; and eight that cost less than the leanest
    # at the batch that is found, two of them with the whole loss in chunks.
    assert 0 < found.plain < found.recomputed and len(compiled) <= 8 + in_chunks + 8
    assert found.plan.target == "h100" and found.plan.verified.peak_bytes <= budget
    assert found.plan.compilations <= 6
    assert peak(fn, found.plain) <= budget < peak(fn, found.plain + 1)
    planned = found.plan.apply(fn)
    assert peak(planned, found.recomputed) == found.plan.verified.peak_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", [jax.nn.gelu, jnp.square])
def test_chunks_fit_more_examples(compiled, activation):
    fn = functools.partial(loss, activation=activation)
    with_chunks, whole = (
        jrc.largest_batch(make_args, fn, 2**26, target="h100", chunks=chunks)
        for chunks in (True, False)
    )
    assert with_chunks.recomputed > 1.4 * whole.recomputed


def test_what_cannot_fit_is_not_compiled(compiled):
    parameters = 4 * 8 * LAYERS * WIDTH * WIDTH
    none = jrc.largest_batch(make_args, loss, 2 * parameters, target="h100")
    assert none[:3] == (0, 0, None) and not compiled


def test_where_all_fit_nothing_is_recomputed(compiled):
    found = jrc.largest_batch(
        make_args, loss, "1GiB", target="h100", most=16, multiple_of=8, minimize="flops"
    )
    assert (found.plain, found.recomputed) == (16, 16) and not found.plan.reruns
    assert len(compiled) <= 2


@pytest.mark.parametrize("start", [None, Start(100, 900), Start(3000, 0, least=40), Start(0, 0)])
@pytest.mark.parametrize("step", [1, 8])
def test_the_largest_size_within_a_budget(start, step):
    asked = []

    def bytes_of(size):
        asked.append(size)
        return 1000 + 7 * size + (40 * (size - 200) if size > 200 else 0)

    found = largest_within(bytes_of, 2890, step, 2**20, start)
    assert found == 210 // step * step and len(asked) == len(set(asked)) <= 10
    assert {found, found + step} <= set(asked)


def test_sizes_that_do_not_fit_or_all_fit():
    assert largest_within(lambda size: 10, 9, 4, 64, Start(16, 0)) == 0
    assert largest_within(lambda size: 10, 9, 4, 64, Start(16, 0, least=8)) == 8
    assert largest_within(lambda size: 10, 10, 4, 64, Start(16, 0)) == 64
    assert line_meets({0: 5, 10: 5}, 9) == float("inf")
    assert line_meets({0: 10, 10: 30, 90: 1000}, 50) == 20


def test_peaks_that_stop_to_grow_do_not_slow_the_search():
    """As where `make_args` takes no more examples than there are."""
    asked = []

    def bytes_of(size):
        asked.append(size)
        return 1_000_000 + 10_000 * min(size, 4096)

    assert largest_within(bytes_of, 1_300_000, 1, 2**20, Start(2**16, 500_000, least=1)) == 30
    assert len(asked) <= 7


def long_inputs(batch):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return shape((256, 4)), shape((batch, 1024, 256))


def of_long_inputs(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("mib", [4, 7, 12])
def test_inputs_that_grow_with_the_batch(compiled, mib):
    """Each sequence is of 1 MiB; eight of them do not fit into the smaller budgets."""
    found = jrc.largest_batch(long_inputs, of_long_inputs, mib * 2**20, target="h100")
    here = jrc.largest_batch(long_inputs, of_long_inputs, mib * 2**20)
    assert found[:2] == here[:2] == (mib - 1, mib - 1)
    baseline = next(each for each in found.plan.candidates if each.name == "baseline")
    assert found.plan.verified.seconds <= baseline.verified.seconds


def test_a_plan_that_needs_more_than_nothing_recomputed_is_not_returned(compiled, monkeypatch):
    real = Peaks.compiled

    def worse(self, option):
        cost = real(self, option)
        if option is self.problem.baseline:
            return cost
        return dataclasses.replace(cost, temporaries=cost.temporaries + 2**21)

    monkeypatch.setattr(Peaks, "compiled", worse)
    found = jrc.largest_batch(long_inputs, of_long_inputs, 12 * 2**20, target="h100")
    assert found[:2] == (11, 11) and found.plan.verified.peak_bytes <= 12 * 2**20


@pytest.mark.parametrize("start", [None, Start(40, 0), Start(50_000, 0), Start(3000, 0, least=40)])
def test_peaks_that_fall_are_no_reason_to_creep(start):
    """Up to 1,600 nothing is recomputed; larger batches need recomputation, and less memory."""
    asked = []

    def bytes_of(size):
        asked.append(size)
        return 1000 + 10 * size if size <= 1600 else 900 + 4 * size

    found = largest_within(bytes_of, 17_000, 1, 2**20, start)
    assert found == 4025 and len(asked) <= 20


def test_a_budget_below_the_first_guess():
    peaks = lambda size: 161 if size < 32 else 171  # noqa: E731
    assert largest_within(peaks, 27, 8, 56, Start(5, 161)) == 0
