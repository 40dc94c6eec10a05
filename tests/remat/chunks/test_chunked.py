"""`jrc.chunked`: values, derivatives, bytes and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jrc
from jrc._jaxpr import flops
from tests.draws import integers, normal

KEY = jax.random.key(0)
W, X, LABELS = normal(0, 6, 50), normal(1, 24, 6), integers(2, 50, 24)


def loss(w, x, labels):
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


def close(found, wanted, tolerance=1e-6):
    """Equal within a part of the largest entry of each leaf."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        a, b = np.asarray(a), np.asarray(b)
        scale = np.max(np.abs(b), initial=0.0)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(scale, 1e-30))


def temporaries(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow(after=2, every=True)
@pytest.mark.parametrize("chunks", [1, 2, 7, 9, 24])
def test_a_loss_and_its_gradient(chunks):
    lean = jrc.chunked(loss, (None, 0, 0), chunks=chunks)
    found = jax.jit(jax.value_and_grad(lean, (0, 1)))(W, X, LABELS)
    close(found, jax.jit(jax.value_and_grad(loss, (0, 1)))(W, X, LABELS))


@pytest.mark.slow(every=True)
@pytest.mark.exhaustive(after=2)
@pytest.mark.parametrize("chunks", [5, 2, 16])
def test_a_prime_number_of_rows_runs_in_few_chunks(chunks):
    """The last chunk is shorter: its value and gradient are computed behind the loop."""
    x, labels = X[:23], LABELS[:23]
    lean = jrc.chunked(loss, (None, 0, 0), chunks=chunks)
    both = lambda fn: jax.jit(jax.value_and_grad(fn, (0, 1)))(W, x, labels)  # noqa: E731
    close(both(lean), both(loss))
    hessian = lambda fn: jax.jit(jax.hessian(fn, 1))(W, x, labels)  # noqa: E731
    close(hessian(lean), hessian(loss), 1e-5)
    causal = lambda x: jnp.cumsum(jnp.where(  # noqa: E731
        lax.broadcasted_iota(int, x.shape, 0) > 11, jnp.tanh(x), x), axis=1)  # fmt: skip
    joined = jrc.chunked(causal, chunks=chunks)
    close(jax.jit(joined)(x), jax.jit(causal)(x))
    gradient = lambda fn: jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(fn(x)))))(x)  # noqa: E731
    close(gradient(joined), gradient(causal))
    wide = [each for each in str(jax.make_jaxpr(lean)(W, x, labels)).split() if "f32[23," in each]
    assert all("f32[23,6]" in each for each in wide), wide


def test_forward_mode_and_second_derivatives():
    lean = jrc.chunked(loss, (None, 0, 0), chunks=4)
    tangent = jnp.cos(W)

    def derivatives(fn):
        of_w = lambda w: fn(w, X, LABELS)  # noqa: E731
        along = jax.jvp(of_w, (W,), (tangent,))
        product = jax.jvp(jax.grad(of_w), (W,), (tangent,))
        return along, product, jax.grad(lambda w: jnp.sum(jax.grad(of_w)(w) * tangent))(W)

    found, wanted = (jax.jit(functools.partial(derivatives, fn))() for fn in (lean, loss))
    close(found, wanted, 1e-5)


def test_it_maps_and_lies_in_loops():
    lean = jrc.chunked(loss, (None, 0, 0), chunks=4)
    many = jnp.stack([W, 2 * W])
    mapped = lambda fn: jax.jit(jax.vmap(jax.grad(fn), (0, None, None)))(many, X, LABELS)  # noqa: E731
    close(mapped(lean), mapped(loss))

    def steps(fn):
        step = lambda w, _: (w - jax.grad(fn)(w, X, LABELS), None)  # noqa: E731
        return lambda w: lax.scan(step, w, length=3)[0]

    close(jax.jit(steps(lean))(W), jax.jit(steps(loss))(W), 1e-5)


def test_nothing_of_a_chunk_is_saved_and_nothing_runs_again():
    """Logits of all rows are four arrays of 4 MiB; the lean program has those of one chunk."""
    w, x = jnp.ones((64, 4096)), jnp.ones((256, 64))
    labels = jnp.zeros(256, int)
    lean = jrc.chunked(loss, (None, 0, 0), chunks=32)
    grad = lambda fn: jax.value_and_grad(fn, (0, 1))  # noqa: E731
    assert temporaries(grad(lean), w, x, labels) < temporaries(grad(loss), w, x, labels) / 3
    count = lambda fn: flops(jax.make_jaxpr(grad(fn))(w, x, labels))  # noqa: E731
    assert count(lean) < 1.05 * count(loss)


def test_results_that_are_joined_are_recomputed():
    """Attention in chunks of queries: the scores of all queries are not saved."""

    def attention(q, k, v):
        return jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k)) @ jnp.moveaxis(v, 1, 0)

    q, k, v = (normal(i, 512, 2, 8) for i in range(3))
    lean = jrc.chunked(attention, (0, None, None), 1, chunks=16)
    close(jax.jit(lean)(q, k, v), jax.jit(attention)(q, k, v), 1e-5)
    grad = lambda fn: jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), (0, 1, 2))  # noqa: E731
    close(jax.jit(grad(lean))(q, k, v), jax.jit(grad(attention))(q, k, v), 1e-5)
    assert temporaries(grad(lean), q, k, v) < temporaries(grad(attention), q, k, v) / 4


def test_a_causal_mask_is_made_in_the_chunk():
    """Neither the mask nor the scores of all queries are in the program."""

    def attention(q, k):
        scores = q @ k.T
        rows, columns = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
        return jax.nn.softmax(jnp.where(rows >= columns, scores, -jnp.inf))

    q, k = X[:16], X[8:24]
    lean = jrc.chunked(attention, (0, None), chunks=4)
    close(lean(q, k), attention(q, k))
    shapes = {v.aval.shape for eqn in jax.make_jaxpr(lean)(q, k).eqns for v in eqn.outvars}
    assert (16, 16) in shapes  # the result
    assert "bool[16,16]" not in str(jax.make_jaxpr(lean)(q, k))


def test_random_masks_are_those_of_the_whole():
    def dropped(w, x, key):
        y = jnp.tanh(x @ w)
        return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, y.shape), y, 0.0) ** 2)

    lean = jrc.chunked(dropped, (None, 0, None), chunks=6)
    close(jax.jit(jax.grad(lean))(W, X, KEY), jax.jit(jax.grad(dropped))(W, X, KEY))


def test_low_precision_is_summed_in_float32():
    """The gradient of the weight is no further from float64 than without chunks."""
    x = normal(0, 4096, 8).astype(jnp.bfloat16)
    w = normal(3, 8, 16).astype(jnp.bfloat16)

    def total(w, x):
        return jnp.sum(jnp.tanh((x @ w).astype(jnp.float32)))

    def joined(w, x):
        return jnp.tanh(x @ w)

    exact = jax.grad(total)(w.astype(jnp.float32), x.astype(jnp.float32))
    error = lambda g: float(jnp.max(jnp.abs(g.astype(jnp.float32) - exact)))  # noqa: E731
    plain = error(jax.grad(total)(w, x))
    assert error(jax.grad(jrc.chunked(total, (None, 0), chunks=256))(w, x)) <= 1.5 * plain
    lean = jrc.chunked(joined, (None, 0), chunks=256)
    found = jax.grad(lambda w: jnp.sum(lean(w, x).astype(jnp.float32)))(w)
    assert error(found) <= 1.5 * error(
        jax.grad(lambda w: jnp.sum(joined(w, x).astype(jnp.float32)))(w)
    )


def test_trees_closures_and_several_results():
    scale = jnp.float32(2.0)

    def fn(params, batch, mode):
        y = scale * batch["x"] @ params
        assert mode == "train"
        return {"y": y.T, "loss": jnp.sum(y**2), "count": jnp.sum(batch["mask"]), "rest": params}

    batch = {"x": X, "mask": LABELS > 10}
    lean = jrc.chunked(fn, (None, 0, None), {"y": 1, "loss": None, "count": None, "rest": None},
                       chunks=3)  # fmt: skip
    close(lean(W, batch, "train"), fn(W, batch, "train"))
    value = lambda f: lambda w, s: jnp.sum(jnp.sin(f(w, batch, "train")["y"]) * s)  # noqa: E731
    close(jax.grad(value(lean), (0, 1))(W, scale), jax.grad(value(fn), (0, 1))(W, scale), 1e-5)


UNARY = {
    "tanh": jnp.tanh, "relu": jax.nn.relu, "softmax": jax.nn.softmax, "t": lambda x: x.T,
    "cumsum": lambda x: jnp.cumsum(x, 0) / 4, "rev": lambda x: x[::-1], "sort": jnp.sort,
    "roll": lambda x: jnp.roll(x, 1, 1), "center": lambda x: x - x.mean(0, keepdims=True),
    "norm": lambda x: x / (1 + jnp.sqrt(jnp.sum(x * x, 1, keepdims=True))),
    "split": lambda x: x.reshape(2, 2, 4).transpose(1, 0, 2).reshape(4, 4),
    "take": lambda x: x[jnp.array([2, 0, 1, 1])], "scatter": lambda x: x.at[:, 1].add(x[:, 0]),
    "max": lambda x: jnp.broadcast_to(x.max(1, keepdims=True), x.shape),
    "scan": lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c), x[0], x)[1],
    "mask": lambda x: jnp.where(jnp.tri(4, dtype=bool), x, 0.0),
}  # fmt: skip
BINARY = {"add": jnp.add, "mul": jnp.multiply, "dot": lambda x, y: x @ y,
          "outer": lambda x, y: jnp.einsum("ij,kj->ik", x, y),
          "cat": lambda x, y: jnp.concatenate([x, y], 1)[:, 2:6]}  # fmt: skip


@st.composite
def programs(draw):
    ops = []
    for i in range(draw(st.integers(1, 7))):
        name = draw(st.sampled_from([*UNARY, *BINARY]))
        pick = st.integers(max(0, i - 1), i + 1)
        ops.append((name, draw(pick), draw(pick)))
    is_sum, axis = draw(st.booleans()), draw(st.integers(0, 1))
    return (
        tuple(ops),
        is_sum,
        axis,
        draw(st.sampled_from([(0, None), (None, 0), (0, 0), (1, None)])),
    )


DONE = []


@settings(max_examples=40, deadline=None)
@given(programs())
def test_random_programs(program):
    chunked_or_refused(program)


@pytest.mark.exhaustive
@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(programs())
def test_more_random_programs(program):
    chunked_or_refused(program)


def chunked_or_refused(program):
    """A program is refused, or has the values and gradients of the unchunked one."""
    ops, is_sum, axis, in_axes = program

    def fn(x, y):
        values = [x, y]
        for name, i, j in ops:
            one = (UNARY | BINARY)[name]
            values.append(one(values[i]) if name in UNARY else one(values[i], values[j]))
        last = values[-1]
        return jnp.sum(last * last) if is_sum else last

    args = X[:4, :4], W[:4, 4:8]
    try:
        lean = jrc.chunked(fn, in_axes, None if is_sum else axis, chunks=2)
        found = lean(*args)
    except ValueError as error:
        assert "jrc.chunked: " in str(error)  # noqa: PT017
        DONE.append(False)
        return
    DONE.append(True)
    close(found, fn(*args), 1e-5)
    # Linear in the result: a sine of a large one would show its rounding.
    weights = jnp.cos(jnp.arange(float(found.size))).reshape(found.shape)
    value = lambda f: lambda *a: jnp.sum(weights * f(*a))  # noqa: E731
    close(jax.grad(value(lean), (0, 1))(*args), jax.grad(value(fn), (0, 1))(*args), 1e-4)


def test_enough_of_the_random_programs_ran():
    if DONE:  # unless the test above runs in another process
        assert sum(DONE) > len(DONE) / 10


REFUSED = {
    "in_axes must name an axis along which `<lambda>` computes each slice by itself, got one where "
    "cumsum": (lambda x: jnp.cumsum(x, 0), 0, 0, 4),
    "reads a slice and a sum over all slices": (lambda x: x - x.sum(0, keepdims=True), 0, 0, 4),
    "has a side effect": (lambda x: (jax.debug.print("{}", x), x)[1], 0, 0, 4),
    "chunks must be at most the slices of the axis, which has 24, got 25. Write chunks=24": (
        jnp.tanh, 0, 0, 25),
    "out_axes must say where a result has the axis, got 0 for result 0, which has it at 1. Write "
    "out_axes=1.": (jnp.transpose, 0, 0, 4),
    "got 1 for result 0, which is a sum over it. Write out_axes=None.": (
        lambda x: x.T @ x, 0, 1, 4),
    "in_axes of 0 must be an axis of float32[24,6], got 2. Write a number from 0 to 1, or None.": (
        jnp.tanh, 2, 0, 4),
    "in_axes must begin the tree of the arguments, got (0, 0).": (jnp.tanh, (0, 0), 0, 4),
    "in_axes must name an axis of at least one array of `tanh`, got None.": (
        jnp.tanh, None, None, 4),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text):
    fn, in_axes, out_axes, chunks = REFUSED[text]
    with pytest.raises(ValueError, match="jrc.chunked: ") as caught:
        jrc.chunked(fn, in_axes, out_axes, chunks=chunks)(X)
    assert text in str(caught.value)


def test_a_refused_call_of_a_library_names_the_line_of_the_user():
    """JAX traces `jnp.roll` for all its calls at once."""
    with pytest.raises(ValueError, match=r"got one where slice:\(1,6\) at test_chunked\.py:\d+ do"):
        jrc.chunked(lambda x: jnp.roll(x * 2, 1, axis=0), chunks=4)(X)


def test_complex_sums():
    def total(x):
        return jnp.sum(jnp.exp(1j * x))

    lean = jrc.chunked(total, chunks=2)
    for part in (jnp.imag, jnp.real):
        slope = lambda fn, part=part: jax.jit(jax.grad(lambda x: part(fn(x))))(X[:, 0])  # noqa: E731
        close(slope(lean), slope(total))


def test_a_metric_of_infinite_slope_beside_a_loss():
    both = jrc.chunked(lambda x: (jnp.sum(jnp.sqrt(x)), jnp.sum(x)), chunks=2)
    assert (jax.grad(lambda x: both(x)[1])(jnp.zeros(4)) == 1).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn])
def test_types_of_a_narrow_range_are_scaled_before_they_are_rounded(dtype):
    x = jnp.full(16, 0.25, dtype)
    lean = jrc.chunked(lambda x: jnp.sum(x.astype(jnp.float32) * 1e-9), chunks=4)
    assert (jax.grad(lambda x: lean(x) * 1e9)(x).astype(jnp.float32) == 1).all()


def test_branches_are_cut_as_both_may_be():
    def fn(p, x):
        first = lambda x: jnp.tanh(x.reshape(4, 3)).reshape(12)  # noqa: E731
        second = lambda x: jnp.sin(x.reshape(6, 2)).reshape(12)  # noqa: E731
        return lax.cond(p > 0, first, second, x)

    with pytest.raises(ValueError, match="which has 2, got 4. Write chunks=2"):
        jrc.chunked(fn, (None, 0), chunks=4)(jnp.int32(1), jnp.ones(12))
    close(jrc.chunked(fn, (None, 0), chunks=2)(1, X[:12, 0]), fn(1, X[:12, 0]))


def test_a_rule_that_closes_over_the_axis_is_refused():
    scale = jnp.arange(24.0)[:, None]
    fn = jax.custom_jvp(lambda x: x * 2)
    fn.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * scale))
    with pytest.raises(ValueError, match="custom_jvp_call.* does not compute slices"):
        jrc.chunked(fn, chunks=2)(X)


@jax.custom_vjp
def cross_entropy(logits, labels, z_loss):
    log_z = jax.nn.logsumexp(logits, -1)
    return log_z - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0] + z_loss * log_z**2


def _forward(logits, labels, z_loss):
    return cross_entropy(logits, labels, z_loss), (logits, labels, z_loss)


def _backward(read, g):
    logits, labels, z_loss = read
    log_z = jax.nn.logsumexp(logits, -1)
    weights = g * (1 + 2 * z_loss * log_z)
    hits = jax.nn.one_hot(labels, logits.shape[1])
    gradient = weights[:, None] * jax.nn.softmax(logits) - g[:, None] * hits
    return 3 * gradient, None, jnp.sum(g * log_z**2)  # 3: no derivative of the function itself


cross_entropy.defvjp(_forward, _backward)


@pytest.mark.parametrize("mean", [jnp.mean, lambda x: x], ids=["a sum", "of each"])
def test_a_function_with_cotangents_of_its_own_keeps_them(mean):
    x, w, labels, z_loss = normal(0, 24, 6), normal(1, 6, 50), LABELS, jnp.float32(0.1)
    fn = lambda w, z, x: mean(cross_entropy(x @ w, labels, z))  # noqa: E731
    cut = lambda w, z, x, labels: mean(cross_entropy(x @ w, labels, z))  # noqa: E731
    lean = jrc.chunked(cut, (None, None, 0, 0), chunks=4)
    of_all = lambda fn: lambda *args: jnp.sum(jnp.log1p(fn(*args)))  # noqa: E731
    want = jax.jit(jax.value_and_grad(of_all(fn), (0, 1, 2)))(w, z_loss, x)
    got = jax.jit(jax.value_and_grad(of_all(lambda *args: lean(*args, labels)), (0, 1, 2)))(
        w, z_loss, x
    )
    close(got, want)
    jaxpr = jax.make_jaxpr(lean)(w, z_loss, x, labels)
    assert "cross_entropy" in str(jaxpr)
    assert "f32[24,50]" not in str(jaxpr)


@pytest.mark.parametrize("backward", [
    lambda _, g: (g / jnp.sum(g),), lambda _, g: (g * jnp.arange(24.0)[:, None],),
    lambda _, g: (jnp.flip(g, 0),),
])  # fmt: skip
def test_cotangents_that_depend_on_other_slices_are_refused(backward):
    fn = jax.custom_vjp(lambda x: x * 2)
    fn.defvjp(lambda x: (x * 2, None), backward)
    with pytest.raises(ValueError, match="custom_vjp_call.* does not compute slices"):
        jrc.chunked(fn, chunks=2)(X)


RULES = {
    "clipped": lambda read, g: (jnp.clip(g, -0.05, 0.05),),
    "sign": lambda read, g: (jnp.sign(g),),
    "with decay": lambda read, g: (g + 1e-3 * read,),
    "scaled": lambda read, g: (3 * g,),
}


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("name", RULES)
def test_a_gradient_that_a_rule_changes_is_that_of_the_whole_loss(name):
    """The gradient of a chunk's own sum, scaled afterwards, is another one."""
    changed = jax.custom_vjp(lambda x: x)
    changed.defvjp(lambda x: (x, x), RULES[name])
    fn = lambda w, x: 100 * jnp.exp(jnp.mean(jnp.sin(changed(x @ w))))  # noqa: E731
    lean = jrc.chunked(fn, (None, 0), chunks=5)
    both = lambda fn: jax.jit(jax.value_and_grad(fn, (0, 1)))(W, X)  # noqa: E731
    close(both(lean), both(fn), 2e-6)


def test_what_a_custom_vjp_closes_over_has_no_cotangent():
    table = jnp.cos(jnp.arange(6.0))
    fn = jax.custom_vjp(lambda x: x * table[None])
    fn.defvjp(lambda x: (fn(x), None), lambda _, g: (2 * g * table[None],))
    total = lambda x: jnp.sum(jnp.sin(fn(x)))  # noqa: E731
    close(jax.jit(jax.grad(jrc.chunked(total, chunks=5)))(X), jax.jit(jax.grad(total))(X))


def test_a_rule_that_cannot_be_traced_is_refused_in_our_words():
    def backward(_, g):
        raise NotImplementedError

    fn = jax.custom_vjp(lambda x: x * 2)
    fn.defvjp(lambda x: (x * 2, None), backward)
    with pytest.raises(ValueError, match="custom_vjp_call.* does not compute slices"):
        jrc.chunked(fn, chunks=2)(X)


def test_cotangents_of_what_is_read_whole_are_summed_or_refused():
    fn = jax.custom_vjp(lambda x, w: x * w[None])
    fn.defvjp(lambda x, w: (x * w[None], w), lambda w, g: (g * w[None], jnp.ones_like(w)))
    with pytest.raises(ValueError, match="custom_vjp_call.* does not compute slices"):
        jrc.chunked(fn, (0, None), chunks=2)(X, X[0])


def test_trees_with_nothing_and_with_static_values():
    lean = jrc.chunked(lambda x, mask: {"y": x * 2, "n": 3, "mask": mask}, chunks=2)
    found = lean(X, None)
    assert found["n"] == 3
    assert found["mask"] is None
    close(found["y"], 2 * X)
    close(jrc.chunked(lambda x: (None, x.sum(0)), 0, None, chunks=2)(X)[1], X.sum(0))
    with pytest.raises(ValueError, match="out_axes must begin the tree of the results"):
        jrc.chunked(lambda x: (x, x), 0, (0, 0, 0), chunks=2)(X)
    with pytest.raises(ValueError, match=r"in_axes of 0 must be None for a number, got 0"):
        jrc.chunked(lambda x, y: x * y, chunks=2)(jnp.float32(2), X)


def test_a_checkpoint_around_the_whole_loss_and_numpy_arrays():
    remat = jax.checkpoint(loss)
    lean = jrc.chunked(remat, (None, 0, 0), chunks=4)
    wanted = jax.jit(jax.grad(loss))(W, X, LABELS)
    close(jax.jit(jax.grad(lean))(W, np.asarray(X), np.asarray(LABELS)), wanted)


def test_a_module_that_changes_is_refused():
    from flax import nnx

    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="fn must not change a flax module in place"):
        jrc.chunked(lambda drop, x: jnp.sum(drop(x)), (None, 0), chunks=2)(dropout, X)


def test_an_axis_that_is_split_in_its_type():
    mesh = jax.make_mesh((2,), ("d",))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("d")))
    with pytest.raises(ValueError, match="axes that are whole on each device, got axis 0 of 0"):
        jrc.chunked(jnp.tanh, chunks=2)(x)


def test_wrong_types():
    with pytest.raises(TypeError, match=r"fn must be callable, got int\. Pass the function"):
        jrc.chunked(3, chunks=2)
    with pytest.raises(TypeError, match=r"in_axes must hold whole numbers and None, got 'x'"):
        jrc.chunked(jnp.tanh, "x", chunks=2)
    with pytest.raises(ValueError, match=r"chunks must be a whole number >= 1, got 0"):
        jrc.chunked(jnp.tanh, chunks=0)


def test_what_is_recomputed_in_a_chunk_stays_apart_from_the_first_computation():
    """JAX drops the barrier of a region that it differentiates in a rule: all would be saved."""
    shape = jax.ShapeDtypeStruct
    weights = [shape((64, 512), "float32"), shape((512, 64), "float32")] * 4

    def loss(block):
        def run(weights, x):
            for up, down in zip(weights[::2], weights[1::2], strict=True):
                x = block(up, down, x)
            return jnp.mean(x**2)

        return jrc.chunked(run, in_axes=(None, 0), chunks=4)

    def block(up, down, x):
        return x + jnp.tanh(x @ up) @ down

    def compiled(fn):
        lowered = jax.jit(jax.value_and_grad(fn)).lower(weights, shape((4096, 64), "float32"))
        memory = lowered.compile().memory_analysis()
        return lowered.as_text().count("optimization_barrier"), memory.temp_size_in_bytes

    plain, saved = compiled(loss(block))
    barriers, recomputed = compiled(loss(jax.checkpoint(block)))
    assert plain == 0 and barriers >= 4
    assert recomputed < 0.75 * saved


def test_what_a_region_makes_of_weights_alone_runs_once():
    w, x = jnp.eye(64) * 0.3, normal(3, 128, 64)

    def count(block):
        fn = jrc.chunked(lambda w, x: jnp.mean(block(w, x) ** 2), (None, 0), chunks=16)
        return flops(jax.make_jaxpr(jax.grad(fn))(w, x))

    block = lambda w, x: jnp.tanh(x @ (w @ w @ w))  # noqa: E731
    assert count(jax.checkpoint(block)) == count(block)


def test_an_unused_result_of_a_region_limits_no_chunks():
    block = jax.checkpoint(lambda w, x: (jnp.tanh(x @ w), jnp.sin(x.reshape(8, 18))))
    fn = lambda w, x: jnp.mean(block(w, x)[0] ** 2)  # noqa: E731
    w = W[:, :6]
    lean = jrc.chunked(fn, in_axes=(None, 0), chunks=12)
    close(jax.grad(lean)(w, X), jax.grad(fn)(w, X))


def test_rows_that_are_counted_are_independent():
    """What is written by hand for the logits of labels, where there are one or two batch axes."""

    def loss(logits, labels):
        rows = jnp.arange(labels.shape[0])[:, None], jnp.arange(labels.shape[1])
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - logits[*rows, labels])

    logits = jnp.asarray(np.random.default_rng(1).normal(size=(8, 5, 7)), jnp.float32)
    labels = jnp.arange(40).reshape(8, 5) % 7
    lean = jrc.chunked(loss, in_axes=(0, 0), chunks=4)
    np.testing.assert_allclose(lean(logits, labels), loss(logits, labels), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lean)(logits, labels), jax.grad(loss)(logits, labels), 1e-6)


SHIFT = 12 * jnp.eye(4)[None]


def solved(w, a, b):
    return jnp.mean(jnp.linalg.solve(a @ w + SHIFT, b) ** 2)


def inverted(w, a, b):
    return jnp.mean(jnp.linalg.inv(a @ w + SHIFT) @ b)


def solved_each(w, a, b):
    one = lambda a, b: jnp.linalg.solve(a @ w + SHIFT[0], b)  # noqa: E731
    return jnp.mean(jax.vmap(one)(a, b) ** 2)


def solved_symmetric(w, a, b):
    spd = a @ a.transpose(0, 2, 1) + SHIFT
    return jnp.mean(jax.scipy.linalg.solve(spd, b, assume_a="pos") ** 2)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("fn", [solved, inverted, solved_each, solved_symmetric])
def test_linear_equations_of_a_batch(fn):
    """Of 5 chunks the last is shorter."""
    args = normal(0, 4, 4), normal(1, 33, 4, 4), normal(2, 33, 4, 1)
    lean = jrc.chunked(fn, (None, 0, 0), chunks=5)
    wanted = jax.value_and_grad(fn, argnums=(0, 1, 2))
    found = jax.value_and_grad(lean, argnums=(0, 1, 2))
    close(jax.jit(found)(*args), jax.jit(wanted)(*args), 1e-5)
    second = lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, *args[1:]) ** 2))  # noqa: E731
    close(jax.jit(second(lean))(args[0]), jax.jit(second(fn))(args[0]), 1e-5)


def test_one_system_of_equations_is_not_independent():
    with pytest.raises(ValueError, match="custom_linear_solve"):
        lean = jrc.chunked(lambda b: jnp.sum(jnp.linalg.solve(SHIFT[0], b)), 0, chunks=2)
        lean(jnp.ones(4))
