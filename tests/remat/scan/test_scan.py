"""`jrc.recompute_scan`: equal results, fewer saved bytes, and the order of recomputed steps."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jrc
from jrc.remat._scan.schedule import Level, levels_of, segment_counts
from tests.remat.measure import bit_equal, largest_error, operators, saved_bytes

W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
H = jnp.linspace(-0.4, 0.6, 8).reshape(2, 4)
CARRY = H.nbytes


def cut(segments, **options):
    return functools.partial(jrc.recompute_scan, segments=segments, **options)


def inputs(n):
    return jnp.asarray(np.sin(np.arange(4.0 * n, dtype=np.float32)).reshape(n, 1, 4))


def loss(w, h, xs, scan):
    """A loss with two sines in each step, outputs that count, and closed-over parameters."""

    def body(h, x):
        h = jnp.sin(jnp.sin(h @ w) + x)
        return h, jnp.sum(h * h)

    h, ys = scan(body, h, xs)
    return jnp.sum(h) + jnp.sum(jnp.cos(ys))


def gradient(scan):
    return jax.value_and_grad(functools.partial(loss, scan=scan), argnums=(0, 1, 2))


# --- Where carries are saved ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "length", "levels"),
    [
        ("sqrt", 9, (Level(0, 3, 3), Level(0, 3, 1))),
        ("sqrt", 13, (Level(1, 3, 4), Level(0, 4, 1))),
        ("sqrt", 1, (Level(0, 1, 1),)),
        ("log", 4, (Level(0, 4, 1),)),
        ("log", 7, (Level(1, 3, 2), Level(0, 2, 1))),
        ("log", 64, (Level(0, 4, 16), Level(0, 4, 4), Level(0, 4, 1))),
        (1, 5, (Level(0, 1, 5), Level(0, 5, 1))),
        (5, 5, (Level(0, 5, 1),)),
        (3, 11, (Level(2, 3, 3), Level(0, 3, 1))),
        ((2, 3), 15, (Level(1, 2, 7), Level(1, 3, 2), Level(0, 2, 1))),
        ([2, 2], 4, (Level(0, 2, 2), Level(0, 2, 1))),
    ],
)
def test_golden_levels(segments, length, levels):
    assert levels_of(length, segment_counts(segments, length)) == levels


def test_levels_save_as_few_carries_as_documented():
    for length in range(1, 1100):
        carries = {
            name: sum(x.rest + x.segments for x in levels_of(length, segment_counts(name, length)))
            for name in ("sqrt", "log")
        }
        assert carries["sqrt"] <= 2.3 * length**0.5 + 2
        assert carries["log"] <= 3 * length.bit_length() + 1


def order(n, segments, reverse=False):
    """Return the runs of steps and of their derivatives, in the order in which they happen."""
    seen = []

    def record(sign, i):
        seen.append(sign + str(int(i)))

    @jax.custom_vjp
    def note(h, i):
        return h

    def forward(h, i):
        return h, i

    def backward(i, cotangent):
        jax.debug.callback(functools.partial(record, "-"), i)
        return cotangent, None

    note.defvjp(forward, backward)

    def body(h, i):
        jax.debug.callback(functools.partial(record, "+"), i)
        return note(jnp.sin(h), i), None

    with jax.disable_jit():
        jax.grad(lambda h: cut(segments, reverse=reverse)(body, h, jnp.arange(n))[0])(0.5)
        jax.effects_barrier()
    return " ".join(seen)


# `+3` runs step 3, `-3` propagates the cotangent through it; the step runs just before that.
@pytest.mark.slow(after=2, every=True)
@pytest.mark.parametrize(
    ("n", "segments", "backward"),
    [
        (4, 4, "+3 -3 +2 -2 +1 -1 +0 -0"),
        (4, 1, "+0 +1 +2 +3 -3 +2 -2 +1 -1 +0 -0"),
        (4, 2, "+2 +3 -3 +2 -2 +0 +1 -1 +0 -0"),
        (7, 2, "+4 +5 +6 -6 +5 -5 +4 -4 +1 +2 +3 -3 +2 -2 +1 -1 +0 -0"),
        (
            8,
            (2, 2),
            "+4 +5 +6 +7 -7 +6 -6 +4 +5 -5 +4 -4 +0 +1 +2 +3 -3 +2 -2 +0 +1 -1 +0 -0",
        ),
    ],
)
def test_golden_order(n, segments, backward):
    ahead = " ".join(f"+{i}" for i in range(n))
    assert order(n, segments) == f"{ahead} {backward}"
    turned = re.sub(r"\d", lambda i: str(n - 1 - int(i[0])), f"{ahead} {backward}")
    assert order(n, segments, reverse=True) == turned


# --- Equal results, saved bytes and recomputed steps ----------------------------------------------


def requests(draw, n):
    """Draw a value of `segments` for a loop of `n` steps."""
    first = draw(st.integers(1, n)) if n else "log"
    levels = (first, draw(st.integers(1, n // first))) if n else "sqrt"
    return draw(st.sampled_from(["sqrt", "log", first, levels]))


@settings(deadline=None)
@given(data=st.data(), n=st.integers(1, 2000))
def test_levels_cover_every_step_once(data, n):
    levels = levels_of(n, segment_counts(requests(data.draw, n), n))
    for level in levels:
        assert 0 <= level.rest < level.segments
        assert level.rest + level.segments * level.size == n
        n = level.size
    assert n == 1


@settings(max_examples=8, deadline=None)
@given(data=st.data(), n=st.integers(0, 40), reverse=st.booleans(), unroll=st.integers(1, 3))
def test_equal_to_lax_scan(data, n, reverse, unroll):
    recomputed = cut(requests(data.draw, n), reverse=reverse, unroll=unroll)
    plain = functools.partial(jax.lax.scan, reverse=reverse)
    # One program, compiled without optimisation: compilation is most of the test's time.
    both = jax.jit(
        lambda *args: (gradient(recomputed)(*args), gradient(plain)(*args)),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    for got, want in zip(*map(jax.tree.leaves, both(W, H, inputs(n))), strict=True):
        largest = np.max(np.abs(want), initial=1e-30)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * float(largest))


def test_bit_equal_where_nothing_is_fused():
    with jax.disable_jit():
        got, want = (gradient(scan)(W, H, inputs(7)) for scan in (cut((2, 2)), jax.lax.scan))
    assert bit_equal(got, want)


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("n", [64, 256, 1024])
def test_saved_carries(n):
    def carries(segments):
        f = functools.partial(loss, scan=cut(segments))
        return (saved_bytes(f, W, H, inputs(n)) - 4 * n) / CARRY  # less the cosine of each y

    assert [carries(s) for s in ("sqrt", "log")] == [round(n**0.5), 4]
    if n == 64:
        assert [carries(s) for s in (1, n, (8, 4))] == [1, n, 8]


@pytest.mark.slow
def test_compiled_peak_grows_as_the_root_and_the_logarithm():
    h = jnp.ones((64, 4))

    def temporaries(n, scan):
        """Return the gradient's temporaries in carries, without `y`s and their cotangents."""
        memory = jax.jit(gradient(scan)).lower(W, h, inputs(n)).compile().memory_analysis()
        return (memory.temp_size_in_bytes - 2 * 4 * n) / h.nbytes

    plain, sqrt, log = (
        [temporaries(n, scan) for n in (64, 256, 1024)]
        for scan in (jax.lax.scan, cut("sqrt"), cut("log"))
    )
    more = lambda sizes: [b - a for a, b in itertools.pairwise(sizes)]  # noqa: E731
    # One level saves a carry for each segment and each step of a segment; "log" adds a level of
    # four. `lax.scan` saves several values of each step.
    assert more(sqrt) == pytest.approx([16, 32], abs=4)
    assert more(log) == pytest.approx([4, 4], abs=4)
    assert more(plain)[1] > 3 * 768


@pytest.mark.parametrize(("segments", "runs_ahead"), [(1, 4 + 3), (4, 4)])
def test_compiled_program_recomputes(segments, runs_ahead):
    """Without the barrier, XLA would merge an unrolled loop with its recomputation."""
    f = jax.jit(gradient(cut(segments, unroll=True)))
    dots = f.lower(W, H, inputs(4)).compile().as_text().count(" dot(")
    assert dots == runs_ahead + 4 * 3


@pytest.mark.parametrize("n", [64, 256, 1024])
def test_steps_run_as_often_as_documented(n):
    def runs(segments):
        """Return how often the body runs: each run has two sines, each derivative a cosine."""
        return operators(gradient(cut(segments)), W, H, inputs(n))["dot_general"] / n - 2

    root = round(n**0.5)
    quarters = (n.bit_length() - 1) // 2
    assert runs("sqrt") == 3 - root / n
    assert runs("log") == 2 + 0.75 * (quarters - 1)
    assert runs(n) == 2 and runs(1) == 3 - 1 / n


def test_program_grows_as_the_number_of_levels():
    def bodies(n, segments):
        program = str(jax.make_jaxpr(gradient(cut(segments)))(W, H, inputs(n)))
        return program.count("dot_general[")

    assert bodies(16, "sqrt") == bodies(1024, "sqrt") == 5
    # One more level is one more copy of the body, which recomputes carries.
    assert [bodies(4**k, "log") for k in (2, 3, 4, 5)] == [5, 6, 7, 8]
    # A remainder adds four copies.
    assert bodies(17, "sqrt") - bodies(16, "sqrt") <= 5
    assert max(bodies(n, "log") for n in (1021, 1022, 1023, 1025)) <= 8 + 5 * 5


@pytest.mark.slow
def test_cotangents_of_large_inputs_and_constants_are_stored_once():
    """A level with an accumulator of its own would add one such array per level."""
    xs, w = jnp.ones((256, 64, 4)), jnp.ones((4, 4096)) * 1e-3

    def small(w, xs, segments):
        def body(h, x):
            return jnp.sin(h + jnp.mean(x @ w, axis=1)[:1] + jnp.sum(x)), None

        return jnp.sum(cut(segments)(body, jnp.zeros(1), xs)[0])

    def temp(segments):
        f = jax.grad(functools.partial(small, segments=segments), argnums=(0, 1))
        return jax.jit(f).lower(w, xs).compile().memory_analysis().temp_size_in_bytes

    # The temporaries of one step are the same at all depths.
    assert abs(temp("log") - temp((2,) * 7)) < min(xs.nbytes, w.nbytes) / 2
    assert abs(temp("log") - temp("sqrt")) < min(xs.nbytes, w.nbytes) / 2


@pytest.mark.parametrize("segments", ["sqrt", "log"])
def test_outputs_that_the_loss_does_not_read_have_no_cotangents(segments):
    h = jnp.ones((8, 64))

    def size(outputs, aux):
        """Return temporaries and results of the compiled gradient, in arrays of all outputs."""

        def f(w):
            body = lambda c, _: (jnp.sin(c @ w), jnp.sin(c @ w) if outputs else None)  # noqa: E731
            last, ys = cut(segments)(body, h, None, length=64)
            return jnp.sum(last), ys if aux else None

        lowered = jax.jit(jax.grad(f, has_aux=True)).lower(jnp.ones((64, 64)))
        memory = lowered.compile().memory_analysis()
        return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / (64 * h.nbytes)

    plain = size(False, False)
    assert size(True, False) == pytest.approx(plain, abs=0.05)
    assert size(True, True) == pytest.approx(plain + 1, abs=0.05)


def test_cotangents_are_of_what_is_read_only():
    def f(w):
        body = lambda c, _: ((jnp.sin(c[0] @ w), c[1] + 1.0), (c[0], c[1]))  # noqa: E731
        return jnp.sum(cut(2)(body, (H, jnp.ones((3, 5))), None, length=6)[0][0])

    shapes = re.findall(r"f32\[([\d,]*)\]", str(jax.make_jaxpr(lambda w: jax.vjp(f, w)[1](1.0))(W)))
    assert "4,4" in shapes and "6,2,4" in shapes
    text = str(jax.make_jaxpr(jax.vjp(f, W)[1])(1.0))
    assert "6,2,4" not in text and "6,3,5" not in text and "3,2,4" in text


# --- Kinds of carries, inputs and outputs ---------------------------------------------------------


def mixed(carry, x):
    """A body with integers, booleans, float16, keys, `None` and nested trees everywhere."""
    key, own = jax.random.split(carry["key"])
    mask = jax.random.bernoulli(own, 0.5, (4,)) | jax.random.bernoulli(x["key"], 0.3, (4,))
    h = jnp.sin(carry["h"] + x["x"][0] * mask) * x["scale"]
    half = carry["half"] + jnp.sum(h).astype(jnp.bfloat16)
    new = {"key": key, "h": h, "half": half, "count": carry["count"] + x["i"], "none": None}
    return new, (h[:2], carry["count"] > 3, {"key": own})


def mixed_arguments(n):
    carry = {
        "key": jax.random.key(0),
        "h": jnp.arange(4.0),
        "half": jnp.bfloat16(0.5),
        "count": jnp.int32(2),
        "none": None,
    }
    xs = {
        "key": jax.random.split(jax.random.key(1), n),
        "x": (jnp.sin(jnp.arange(4.0 * n)).reshape(n, 4),),
        "scale": jnp.linspace(0.5, 1.5, n),
        "i": jnp.arange(n),
    }
    return carry, xs


@pytest.mark.slow
def test_trees_integers_halves_and_keys():
    carry, xs = mixed_arguments(11)

    def run(h, x, scale, scan):
        last, ys = scan(mixed, carry | {"h": h}, xs | {"x": (x,), "scale": scale})
        value = jnp.sum(last["h"]) + last["half"].astype(jnp.float32) + jnp.sum(ys[0] ** 2)
        return value, (last, ys)

    f = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True), static_argnums=3)
    args = (carry["h"], xs["x"][0], xs["scale"])
    (got, (last, ys)), grads = f(*args, cut((2, 2)))
    (want, (want_last, want_ys)), want_grads = f(*args, jax.lax.scan)
    assert jax.tree.structure((last, ys)) == jax.tree.structure((want_last, want_ys))
    same = lambda a, b: a.dtype == b.dtype and a.shape == b.shape and type(a) is type(b)  # noqa: E731
    assert all(map(same, jax.tree.leaves((last, ys)), jax.tree.leaves((want_last, want_ys))))
    assert bit_equal(jax.random.key_data(last["key"]), jax.random.key_data(want_last["key"]))
    assert bit_equal(ys[1], want_ys[1]) and int(last["count"]) == 2 + 55
    assert largest_error((got, grads), (want, want_grads)) < 1e-6


def test_no_inputs_no_outputs_and_python_numbers():
    def run(w, scan):
        # The first carry is a Python number, whose type is that of the body's result.
        last, ys = scan(lambda c, _: (jnp.sin(c * w) + 1.0, None), 0.5, None, length=6)
        assert ys is None and last.dtype == jnp.float32
        return last

    got, want = (jax.value_and_grad(run)(0.7, scan) for scan in (cut(2), jax.lax.scan))
    assert largest_error(got, want) < 1e-6


@pytest.mark.parametrize("n", [0, 1])
def test_very_short_loops(n):
    for segments in ("sqrt", "log"):
        got, want = (gradient(scan)(W, H, inputs(n)) for scan in (cut(segments), jax.lax.scan))
        assert largest_error(got, want) < 1e-6 and got[1][2].shape == (n, 1, 4)
    last, ys = jrc.recompute_scan(lambda c, x: (c + x, {"y": 2 * x}), jnp.int32(1), jnp.arange(n))
    assert int(last) == 1 and ys["y"].shape == (n,)


def test_a_length_may_be_any_whole_number():
    for n in (4, np.int64(4), jnp.int32(4)):
        assert float(jrc.recompute_scan(add, jnp.float32(0), None, length=n)[0]) == 4


def test_no_tracer_outlives_its_trace():
    with jax.checking_leaks():
        assert jax.grad(functools.partial(loss, scan=cut(2)))(W, H, inputs(3)).shape == W.shape


@jax.custom_jvp
def underivable(x):
    return x + 1.0


@underivable.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError("no derivative")


@pytest.mark.slow
def test_frozen_values_may_have_no_derivative():
    """Constants, carries and inputs; a carry that depends on perturbed values has one."""

    def run(w, frozen, scan):
        def body(carry, x):
            h, still, moved = carry
            h = jnp.sin(h @ w + underivable(frozen) + underivable(still) + underivable(x))
            return (h, underivable(still), moved + h), (h, still)

        last, (hs, _) = scan(body, (H, jnp.ones(4)[None], 0 * H), inputs(5))
        return jnp.sum(last[0]) + jnp.sum(last[2]) + jnp.sum(hs)

    f = jax.jit(jax.grad(run), static_argnums=2)
    args = W, jnp.ones((1, 4))
    assert largest_error(f(*args, cut((2, 2))), f(*args, jax.lax.scan)) < 1e-6
    second = jax.jit(jax.jacfwd(jax.grad(run)), static_argnums=2)
    assert largest_error(second(*args, cut(2)), second(*args, jax.lax.scan)) < 1e-5
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(run, argnums=1)(*args, cut(2))


def test_python_numbers_as_cotangents_and_integers_as_arguments():
    def run(w, scan):
        return scan(lambda c, x: (jnp.sin(c * w + x), None), w * 0.5, jnp.arange(5.0))[0]

    got, want = (
        jax.vjp(functools.partial(run, scan=s), 0.7)[1](1.0) for s in (cut(2), jax.lax.scan)
    )
    assert largest_error(got, want) < 1e-6
    floats = lambda i: cut(2)(lambda c, x: (c * 1.5 + x, None), 1.0, i)[0]  # noqa: E731
    assert jax.grad(floats, allow_int=True)(jnp.arange(4)).dtype == jax.dtypes.float0


def test_types_stay_as_weak_as_in_lax_scan():
    strong = jnp.float32(2)
    for factor, first in itertools.product((2.0, strong), (0.5, strong, jnp.asarray(0.5))):
        body = lambda c, _: (c * factor, c)  # noqa: B023, E731
        got, want = (s(body, first, None, length=4) for s in (cut(2), jax.lax.scan))
        assert bit_equal(got, want)
        assert got[0].weak_type == want[0].weak_type
        assert factor is strong or got[1].weak_type == want[1].weak_type


def test_two_loops_nest():
    def both(w, scan):
        def outer(h, x):
            return scan(lambda h, x: (jnp.sin(h @ w + x), None), h, x)[0], None

        return jnp.sum(scan(outer, H, inputs(12).reshape(4, 3, 1, 4))[0])

    got, want = (jax.jit(jax.grad(both), static_argnums=1)(W, s) for s in (cut(2), jax.lax.scan))
    assert largest_error(got, want) < 1e-6


def test_vmap():
    def run(scan):
        f = jax.value_and_grad(functools.partial(loss, scan=scan), argnums=(0, 1, 2))
        return jax.jit(jax.vmap(f, in_axes=(None, 0, None)))(W, jnp.stack([H, 2 * H]), inputs(7))

    assert largest_error(run(cut((2, 2))), run(jax.lax.scan)) < 1e-6


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = Mesh(jax.devices()[:2], ("data",))

    def run(scan):
        def local(w, h, xs):
            # With `check_vma`, JAX has already summed the gradient of a replicated value.
            value, grads = gradient(scan)(w, h, xs)
            if not check_vma:
                grads = jax.lax.psum(grads[0], "data"), grads[1], jax.lax.psum(grads[2], "data")
            return jax.lax.psum(value, "data"), grads

        specs = {"in_specs": (P(), P("data"), P()), "out_specs": (P(), (P(), P("data"), P()))}
        mapped = jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)
        return jax.jit(mapped)(W, H, inputs(7))

    assert largest_error(run(cut((2, 2))), run(jax.lax.scan)) < 1e-6


@pytest.mark.slow
def test_second_derivatives_both_ways_and_no_forward_mode():
    def at(x, scan):
        return loss(W * x, H, inputs(5), scan)

    recomputed, plain = (functools.partial(at, scan=scan) for scan in (cut((2, 2)), jax.lax.scan))
    forward, backward = (jax.jit(turn(jax.grad(recomputed))) for turn in (jax.jacfwd, jax.jacrev))
    want = jax.jit(jax.hessian(plain))(0.7)
    assert largest_error(forward(0.7), want) < 1e-5 and largest_error(backward(0.7), want) < 1e-5
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(recomputed, (0.7,), (1.0,))


def test_inside_recompute_and_around_it():
    def around(w):
        call = functools.partial(jrc.recompute, lambda h, x: jnp.sin(jnp.sin(h @ w) + x))
        return jnp.sum(jrc.recompute_scan(lambda h, x: (call(h, x), None), H, inputs(6))[0])

    def inside(w):
        def run(w):
            body = lambda h, x: (jnp.sin(jnp.sin(h @ w) + x), None)  # noqa: E731
            return jrc.recompute_scan(body, H, inputs(6))[0]

        return jnp.sum(jrc.recompute(run, w))

    def plain(w):
        body = lambda h, x: (jnp.sin(jnp.sin(h @ w) + x), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, H, inputs(6))[0])

    want = jax.jit(jax.grad(plain))(W)
    assert largest_error(jax.jit(jax.grad(around))(W), want) < 1e-6
    assert largest_error(jax.jit(jax.grad(inside))(W), want) < 1e-6


# --- Errors ---------------------------------------------------------------------------------------


def add(c, x):
    return c + 1.0, x


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((3, 0.0, None), {"length": 2}, TypeError, "body must be a function, got int. Write jrc"),
        ((add, 0.0, {"a": jnp.ones(3), "b": jnp.ones(4)}), {}, ValueError, "'a': 3, 'b': 4 and le"),
        ((add, 0.0, jnp.ones(3)), {"length": 4}, ValueError, ": 3 and length=4"),
        (
            (add, 0.0, None),
            {"length": 2.5},
            TypeError,
            "length must be a whole number >= 0, got 2.5. Write len",
        ),
        ((add, 0.0, None), {"length": "4"}, TypeError, "got '4'. .*known when the loop is traced"),
        (
            (add, 0.0, None),
            {"length": -1},
            ValueError,
            "length must be a whole number >= 0, got -1",
        ),
        ((add, 0.0, None), {}, ValueError, "got no xs and length=None. With xs=None pass length=N"),
        ((add, 0.0, {"a": 1.0}), {}, TypeError, "got no axis at 'a'. Close over"),
        ((add, 0.0, None), {"length": 4, "segments": "cbrt"}, ValueError, "'log'.*, got 'cbrt'"),
        ((add, 0.0, None), {"length": 4, "segments": 2.5}, TypeError, "got 2.5. Write segments=8"),
        ((add, 0.0, None), {"length": 4, "segments": True}, TypeError, "got True"),
        (
            (add, 0.0, None),
            {"length": 4, "segments": 0},
            ValueError,
            "segments=0. Write segments=1",
        ),
        ((add, 0.0, None), {"length": 4, "segments": (2, -1)}, ValueError, r"segments=\(2, -1\)"),
        ((add, 0.0, None), {"length": 4, "segments": ()}, ValueError, r"at least one level.*=\(\)"),
        (
            (add, 0.0, None),
            {"length": 4, "segments": 5},
            ValueError,
            "5 in all, for 4 steps. Write",
        ),
        ((add, 0.0, None), {"length": 4, "segments": (3, 2)}, ValueError, "6 in all, for 4 steps"),
        (
            (lambda c, x: (c + 1.0, x), jnp.int32(1), None),
            {"length": 4},
            TypeError,
            "carry input and carry output",
        ),
    ],
)
def test_errors(arguments, options, error, match):
    with pytest.raises(error, match=match):
        jrc.recompute_scan(*arguments, **options)
