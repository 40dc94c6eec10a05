"""Predicted peaks on GPUs and TPUs: programs whose structure XLA compiles in a known way."""

import functools
import tracemalloc

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jrc.remat._planner.costs.compilers import compiler_on
from jrc.remat._planner.costs.operations import Operations
from jrc.remat._planner.costs.traced_peak import peak_of_temporaries
from jrc.remat._planner.costs.written_values import WrittenValues
from jrc.remat._planner.search.peaks import Peaks
from tests.remat.planner.problems import problem_of


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(params, x):
    """The denominators of the softmax are broadcast for the derivative of the product."""
    for w in params:
        q, k, v = jnp.moveaxis((x @ w).reshape(4, 512, 3, 8, 32), 2, 0)
        weights = jax.nn.softmax(jnp.einsum("bqhc,bkhc->bhqk", q, k), axis=-1)
        x = x + jnp.einsum("bhqk,bkhc->bqhc", weights, v).reshape(x.shape)
    return jnp.sum(x**2)


def mixed_widths(params, x):
    """Functions with several readers are written; arithmetic is computed in its readers."""
    for up, down in params:
        x = jax.nn.gelu(x @ up) @ down
    return jnp.sum(x**2)


MIXED = [(array(32, 128), array(128, 32))] * 4, array(1024, 32)
ATTENTION = [array(256, 768)] * 3, array(4, 512, 256)


def peak_on(platform, fn, *args):
    return peak_of_temporaries(jax.make_jaxpr(fn)(*args), compiler_on(platform))


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


def rounded_bytes(fn, *args):
    """The bytes of what a TPU writes as bfloat16, by shape."""
    program = Operations(jax.make_jaxpr(fn)(*args), compiler_on("tpu"))
    made = program.rounded.intersection(v for each in program.list for v in each.makes)
    return {program.shapes[v]: program.sizes[v] for v in made}


def with_a_product(read):
    """A program that reads one value in a product, and in another way."""

    def fn(a, b):
        y = b * 2
        return a @ y, read(y)

    return fn


def test_a_tpu_writes_what_products_alone_read_as_bfloat16():
    a, b = array(256, 512), array(512, 128)
    moved = lambda y: a_like @ jax.lax.optimization_barrier(y.T).T  # noqa: E731
    a_like = jnp.ones((8, 512))
    half = 512 * 128 * 2
    assert rounded_bytes(lambda a, b: a @ (b * 2), a, b) == {b.shape: half}
    found = rounded_bytes(with_a_product(moved), a, b)
    assert (found[b.shape], found[128, 512]) == (half, half)
    exactly = functools.partial(jnp.dot, a_like, precision="highest")
    for read in (exactly, jnp.sin, lambda y: y, lambda y: jax.lax.map(jnp.sin, y)):
        assert b.shape not in rounded_bytes(with_a_product(read), a, b)


def test_a_tpu_writes_what_a_loop_reads_in_products_alone_as_bfloat16():
    """What a step saves for a product of the backward loop; the carry is as it is."""

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=9)[0])

    found = rounded_bytes(jax.grad(loss), array(64, 64), array(32, 64))
    assert found[9, 32, 64] == 9 * 32 * 128 * 2 and (32, 64) not in found


def kernels_on(platform, fn, *args):
    """The operations that write."""
    written = WrittenValues(Operations(jax.make_jaxpr(fn)(*args), compiler_on(platform)))
    return [
        each.name
        for each, is_written in zip(written.program.list, written.is_written, strict=True)
        if is_written
    ]


def test_a_tpu_computes_what_alone_reads_a_product_behind_it():
    x, w = array(256, 256), array(256, 256)
    residual = lambda x, w: jnp.sort(jnp.tanh(x @ w) + x)  # noqa: E731
    assert kernels_on("tpu", residual, x, w) == ["add", "sort"]
    assert kernels_on("gpu", residual, x, w) == ["dot_general", "add", "sort"]
    # The last of two products; none that has other readers, is returned, or is moved.
    for fn in (
        lambda x, w: jnp.sort(x @ w + (x * 2) @ w),
        lambda x, w: (lambda y: jnp.sort(jnp.sin(y) * y))(x @ w),
    ):
        assert kernels_on("tpu", fn, x, w)[0] == "dot_general"
        assert len(kernels_on("tpu", fn, x, w)) == 3
    assert kernels_on("tpu", lambda x, w: (lambda y: (y, y * 2))(x @ w), x, w)[0] == "dot_general"
    assert kernels_on("tpu", lambda x, w: jnp.sort((x @ w)[:8] * 2), x, w)[0] == "dot_general"
    # A product does not write over its operand, of two bytes an entry.
    behind = lambda x, w: jnp.sum(jnp.tanh(jnp.sort(x) @ w) ** 2)  # noqa: E731
    assert peak_on("tpu", behind, x, w) == 256 * 256 * (2 + 4)


def test_an_unknown_platform_is_taken_for_a_cpu():
    assert compiler_on("other") is compiler_on("cpu")
    assert compiler_on("rocm") is compiler_on("cuda") is compiler_on("gpu")


def test_accelerators_keep_less():
    """A GPU computes functions again in each reader, a TPU also the operands of products."""
    gradient = jax.value_and_grad(mixed_widths)
    on_cpu = problem_of(mixed_widths, MIXED).baseline.peak
    assert on_cpu > peak_on("gpu", gradient, *MIXED) > peak_on("tpu", gradient, *MIXED)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_problem_is_of_the_platform_that_is_asked_for(platform):
    problem = problem_of(mixed_widths, MIXED, platform=platform)
    (peak,) = problem.predicted_peaks([problem.baseline])
    gradient = peak_on(platform, jax.value_and_grad(mixed_widths), *MIXED)
    assert Peaks(problem).predicted(problem.baseline) == peak == problem.own + gradient


def test_on_a_cpu_the_solvers_own_model_is_the_prediction():
    problem = problem_of(mixed_widths, MIXED, platform="cpu")
    options, peaks = problem.options, Peaks(problem)
    assert problem.predicted_peaks(options) == [None] * len(options)
    for option in options:
        assert peaks.predicted(option) == peaks.modelled(option) == problem.own + option.peak


def test_inside_of_a_shard_map_bytes_are_those_of_one_device():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    part = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    run = lambda x: jnp.sort(jnp.sort(x * 2) * 3) * 4  # noqa: E731
    x = array(64, 64)
    assert 4 * peak_on("gpu", part(run), x) == peak_on("gpu", run, x)


def test_a_branch_counts_with_the_dearest_of_its_construct():
    lean, rich = (lambda x: x + 1), (lambda x: jnp.sort(jnp.sort(x) @ x) @ x)
    choose = lambda i, x: jax.lax.cond(i > 0, rich, lean, x)  # noqa: E731
    x = array(64, 64)
    index = array(dtype=jnp.int32)
    assert 0 <= peak_on("gpu", choose, index, x) - peak_on("gpu", rich, x) <= index.dtype.itemsize
    assert peak_on("gpu", rich, x) >= 64 * 64 * 4


def test_a_long_chain_takes_memory_in_proportion():
    """Each step is computed inside of the next, and reads one array more from memory."""

    def chain(x, ws):
        for w in ws:
            x = x * w
        return x

    jaxpr = jax.make_jaxpr(chain)(array(8), [array(8)] * 3000)
    program = Operations(jaxpr, compiler_on("gpu"))
    tracemalloc.start()
    try:
        written = WrittenValues(program)
        last = written.last_reads({2999: 0})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert written.is_written.count(True) == 1 and last == dict.fromkeys(range(3001), 0)
    assert most < 3000 * 1000


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_what_is_computed_inside_of_a_reader_is_read_by_it(platform):
    """The last readers, against the set of all that each kernel reads."""
    jaxpr = jax.make_jaxpr(jax.value_and_grad(attention))(*ATTENTION)
    program = Operations(jaxpr, compiler_on(platform))
    written = WrittenValues(program)
    inside, reads = {}, {}
    for k, operation in enumerate(program.list):
        read = frozenset().union(*(inside.get(v, {v}) for v in operation.reads))
        if written.is_written[k]:
            reads[k] = read
        else:
            inside |= dict.fromkeys(operation.makes, read)
    assert len(reads) < len(program.list)
    at = {k: t for t, k in enumerate(reads)}
    last = {}
    for k, read in reads.items():
        last |= {v: max(last.get(v, 0), at[k]) for v in read}
    assert written.last_reads(at) == last


def test_results_lend_their_memory_before_they_are_computed():
    run = lambda x: jnp.sort(jnp.sort(jnp.sort(x)))  # noqa: E731
    assert peak_on("gpu", run, array(64, 64)) == 64 * 64 * 4


def test_programs_without_operations_need_nothing():
    assert peak_on("gpu", lambda x: x, array(8)) == 0
    assert (
        peak_on(
            "tpu",
            lambda: jnp.zeros(()),
        )
        == 0
    )


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_values_that_are_placed_are_what_they_were(platform):
    """A `device_put` of several values is one equation; what lies on the host is not there."""

    def backwards(each, place, x, w):
        values = place([each(jnp.tanh(x @ (w * i)) @ w) for i in range(1, 6)])
        for value in reversed(values):
            x = (x + jax.device_put(value, jax.memory.Space.Device)) @ w
        return x @ w

    same = lambda x: x  # noqa: E731

    def peak(each, place):
        args = array(256, 64), array(64, 64)
        jaxpr = jax.make_jaxpr(functools.partial(backwards, each, place))(*args)
        return peak_of_temporaries(jaxpr, compiler_on(platform))

    plain = peak(same, same)
    # A TPU computes the last of them, a product, where it is added: libtpu takes 1.5 arrays in all.
    assert peak(same, jax.device_put) == plain >= (4 + (platform == "gpu")) * 256 * 64 * 4
    host = functools.partial(jax.device_put, device=jax.memory.Space.Host)
    assert peak(host, same) < plain


def test_equal_operations_are_computed_once():
    def twice(x, w):
        return jnp.tanh(x @ w) + jnp.cos(jnp.tanh(x @ w) @ w)

    x, w = array(256, 64), array(64, 64)
    program = Operations(jax.make_jaxpr(twice)(x, w), compiler_on("gpu"))
    names = [operation.name for operation in program.list]
    assert names.count("tanh") == 1 and names.count("dot_general") == 2


def test_equal_constants_are_one():
    """A number in a traced program is an array without axes, which has no hash."""

    def masked(x):
        parts = []
        for _ in range(2):
            mask = jnp.arange(64)[:, None] >= jnp.arange(64)[None] + jnp.int32(3)
            parts.append(jnp.where(mask, x, jnp.full((64, 64), 0.5)))
        return parts

    program = Operations(jax.make_jaxpr(masked)(array(64, 64)), compiler_on("gpu"))
    names = [operation.name for operation in program.list]
    assert names.count("ge") == names.count("select_n") == 1


def test_each_loop_has_constants_of_its_own():
    """It writes over what it carries."""

    def sums(x):
        step = lambda total, row: (total + row, None)  # noqa: E731
        return [jax.lax.scan(step, jnp.zeros(64), part)[0] for part in (x, 2 * x)]

    program = Operations(jax.make_jaxpr(sums)(array(8, 64)), compiler_on("gpu"))
    loops = [operation for operation in program.list if operation.name == "scan"]
    assert len(loops) == 2
    assert not set(loops[0].reads) & set(loops[1].reads)


def test_operations_on_other_literals_or_shapes_are_others():
    def names(fn, *args):
        return [
            each.name for each in Operations(jax.make_jaxpr(fn)(*args), compiler_on("gpu")).list
        ]

    x = array(64, 64)
    clipped = names(lambda x: jnp.clip(x, 0, 1) + jnp.clip(x, 0, 2) + jnp.clip(x, 0, 2), x)
    assert clipped.count("min") >= 2
    sums = names(lambda x: (x.sum(0), x.reshape(32, 128).sum(0), x.sum(0)), x)
    assert sums.count("reduce_sum") == 2


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_only_threefry_is_computed_in_its_readers(platform):
    def kept(key, x):
        return jax.random.bernoulli(key, 0.9, x.shape) * x

    x = array(1024, 64)
    for impl, peak in (("threefry2x32", 0), ("rbg", x.size * 4)):
        key = jax.eval_shape(functools.partial(jax.random.key, impl=impl), 0)
        assert peak_on(platform, kept, key, x) == pytest.approx(peak, abs=100)


def test_arrays_that_change_are_read_for_every_platform():
    def loss(w, x):
        ref = jax.new_ref(x @ w)
        ref[...] = jnp.tanh(ref[...])
        return jnp.sum(ref[...])

    for platform in ("gpu", "tpu"):
        assert peak_on(platform, loss, array(8, 8), array(64, 8)) >= 0


def sliced(read):
    """Six sums over rows, of each of which the backward pass needs a column or a few."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x) * read(jax.lax.cumsum(x @ w))
        return jnp.mean(x**2)

    args = [array(32, 512)] * 6, array(1024, 32)
    return jax.make_jaxpr(jax.value_and_grad(loss))(*args)


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y[:, :1],
        lambda y: y[:, 7:39],
        lambda y: jax.lax.dynamic_slice(y, (0, 3), (1024, 32)),
    ],
)
def test_a_slice_frees_what_it_is_cut_from(read):
    """As XLA does for an H100: it writes the slice, and keeps no array of 512 columns."""
    whole = 1024 * 512 * 4
    peak = peak_of_temporaries(sliced(read), compiler_on("gpu"))
    assert 2 * whole <= peak < 4 * whole


@pytest.mark.parametrize(
    "read",
    [
        lambda y: (y[:, :-1] * y[:, 1:])[:, :32],
        lambda y: y[:, :256].reshape(1024, 8, 32).sum(1) * y[:, 256:].reshape(1024, 8, 32).sum(1),
    ],
)
def test_slices_that_take_as_much_as_the_whole_are_not_written(read):
    program = Operations(sliced(read), compiler_on("gpu"))
    written = WrittenValues(program).is_written
    cut = [k for k, operation in enumerate(program.list) if operation.name == "slice"]
    halves = [k for k in cut if program.shapes[program.list[k].makes[0]][1] > 128]
    assert len(halves) >= 12 and not any(written[k] for k in halves)


def test_on_a_tpu_a_slice_for_a_kernel_frees_what_it_is_cut_from():
    """Attention kernels return a statistic in 128 equal lanes, and their callers keep one."""

    def loss(ws, x, lanes):
        kept = []
        for w in ws:
            y = jax.lax.cumsum(x @ w)
            kept.append(y[:, 0])
            x = jnp.tanh(x @ w @ w.T)
        for each in kept:
            column = jnp.broadcast_to(each[:, None], (1024, lanes))
            x = x + jax.lax.cumsum(column)[:, :1]
        return x

    def peak(lanes):
        jaxpr = jax.make_jaxpr(functools.partial(loss, lanes=lanes))([array(32, 512)] * 6, x)
        return peak_of_temporaries(jaxpr, compiler_on("tpu"))

    x, whole = array(1024, 32), 1024 * 512 * 4
    assert peak(8) < 3 * whole
    # Broadcast again to what it was: libtpu cuts nothing.
    assert peak(512) > 6 * whole
