"""Independent axes: slices of operands give slices of results, or what adds up to them."""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jrc._jaxpr import (
    Dependent,
    Program,
    axis_rules,
    evaluate,
    independent_axes,
    inline_all,
    primitives,
    slice_program,
    sliced,
)
from jrc._jaxpr.slices import counted

X = np.sin(7 * np.arange(24, dtype=np.float32)).reshape(2, 4, 3)
Y = np.cos(5 * X)
W = np.cos(3 * np.arange(12, dtype=np.float32)).reshape(3, 4)
S = np.stack([np.eye(3, dtype=np.float32) * 3 + np.float32(0.1 * k) for k in range(4)])
AT = np.array([[0], [2], [1], [0]], np.int32)
IMAGE = np.sin(np.arange(96, dtype=np.float32)).reshape(2, 4, 4, 3)
KERNEL = np.full((2, 2, 3, 4), np.float32(1 / 7))
LAYOUT = ("NHWC", "HWIO", "NHWC")


def gathered(x, i):
    numbers = lax.GatherDimensionNumbers((0, 2), (1,), (1,))
    return lax.gather(x, i, numbers, (2, 1, 3))


def gathered_in_batches(x, i):
    numbers = lax.GatherDimensionNumbers((1,), (1,), (1,), (0,), (0,))
    return lax.gather(x, i, numbers, (1, 1, 3))


def scattered(x, i, y):
    numbers = lax.ScatterDimensionNumbers((0, 2), (1,), (1,))
    return lax.scatter_add(x, i, y, numbers)


@jax.custom_jvp
def doubled(x, y):
    return jnp.tanh(x) * y


@doubled.defjvp
def _(primals, tangents):
    x, y = primals
    return doubled(x, y), 2 * y * tangents[0] + tangents[1]


@jax.custom_vjp
def weighted(x, y, w):
    return jnp.tanh(x) * y @ w, x > y


def _weighted_forward(x, y, w):
    return weighted(x, y, w), (x, y, w)


def _weighted_backward(read, cotangents):
    (x, y, w), g = read, cotangents[0]
    return 2 * (g @ w.T) * y, jnp.zeros_like(y), jnp.einsum("abc,abd->cd", x, g)


weighted.defvjp(_weighted_forward, _weighted_backward)


def of_weighted(x, y, w):
    results, vjp = jax.vjp(weighted, x, y, w)
    return results, vjp((jnp.sin(results[0]), np.zeros(results[1].shape, jax.dtypes.float0)))


def steps(x, y):
    return lax.scan(lambda c, row: (c + row, c * row), x[:, 0], jnp.moveaxis(y, 1, 0))


SAMPLES = {
    "add": (lax.add, X, Y), "mul by a number": (lambda x: x * 2.0, X),
    "select": (lambda x, y: lax.select(x > 0, x, y), X, Y), "clamp": (jnp.clip, X, -0.5, 0.5),
    "tanh": (jnp.tanh, X), "cast": (lambda x: x.astype(jnp.float16), X),
    "stop_gradient": (lax.stop_gradient, X),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (5, 2, 4, 3), (1, 2, 3)), X),
    "broadcast of ones": (lambda x: jnp.broadcast_to(x[:, :1], (2, 4, 3)), X),
    "merge": (lambda x: x.reshape(8, 3), X), "split": (lambda x: x.reshape(2, 2, 2, 3), X),
    "flat": (lambda x: x.reshape(-1), X), "two merges": (lambda x: x.reshape(4, 6), X),
    "merge and split": (lambda x: x.reshape(4, 2, 3), X),
    "ones": (lambda x: x[:, None, :, None], X),
    "squeeze": (lambda x: lax.squeeze(x[:, None], (1,)), X),
    "transpose": (lambda x: x.transpose(2, 0, 1), X), "rev": (lambda x: lax.rev(x, (1,)), X),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))), X),
    "slice": (lambda x: x[:, 1:3], X), "strided": (lambda x: x[:, ::2], X),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 1, 0), (2, 2, 3)), X),
    "dynamic_update_slice": (lambda x, y: lax.dynamic_update_slice(x, y[:, :2], (0, 1, 0)), X, Y),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), X, Y),
    "split in parts": (lambda x: tuple(jnp.split(x, 2, 1)), X),
    "stack": (lambda x, y: jnp.stack([x, y], 1), X, Y),
    "tile": (lambda x: jnp.tile(x, (1, 2, 1)), X),
    "sum": (lambda x: x.sum(1), X), "sum of all": (jnp.sum, X), "max": (lambda x: x.max((0, 2)), X),
    "argmax": (lambda x: x.argmax(1), X), "any": (lambda x: (x > 0.8).any(1), X),
    "cumsum": (lambda x: lax.cumsum(x, 1), X), "cummax": (lambda x: lax.cummax(x, 1), X),
    "sort": (lambda x: lax.sort(x, dimension=1), X),
    "sort with values": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), X, Y),
    "top_k": (lambda x: lax.top_k(x, 2), X),
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 1), X),
    "dot": (lambda x, y: lax.dot(x[0], y[0].T), X, Y),
    "batched": (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), X, Y),
    "two contracted": (lambda x, y: jnp.einsum("bij,bij->b", x, y), X, Y),
    "outer": (lambda x, y: jnp.einsum("bij,ckl->ijbckl", x, y), X, Y),
    "gather": (gathered, X, AT), "gather in batches": (gathered_in_batches, X, AT[:2]),
    "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, 2), X, AT[None].repeat(2, 0)),
    "embedding": (lambda x, i: x[1][i], X, AT), "scatter": (scattered, X, AT[:2], Y[:, :2]),
    "convolution": (lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=LAYOUT), IMAGE, KERNEL),
    "grouped": (lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=LAYOUT, feature_group_count=2),
        np.concatenate([IMAGE, IMAGE], 3), KERNEL),
    "grouped batches": (lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=LAYOUT, batch_group_count=2),
        np.concatenate([IMAGE, IMAGE + 1], 0), KERNEL),
    "gradients of each example's kernel": (
        jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.tanh(lax.conv_general_dilated(
            x[None], w, (1, 1), "SAME", dimension_numbers=LAYOUT)))), (None, 0)), KERNEL, IMAGE),
    "merge in another order": (lambda x: lax.reshape(x, (8, 3), (1, 0, 2)), X),
    "pooling": (lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), IMAGE),
    "fft": (lambda x: jnp.fft.rfft(x).real, X), "fft of two": (lambda x: jnp.fft.fft2(x).real, X),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), X, Y),
    "cholesky": (jnp.linalg.cholesky, S),
    "solve_triangular": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), S, S + 1),
    "relu": (jax.nn.relu, X), "custom_jvp": (doubled, X, Y), "scan": (steps, X, Y),
    "a loop with a counter": (
        lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * (i + 1) + x, x), X),
    "a branch with a number that nothing reads": (
        lambda x, y: lax.cond(y[0, 0, 0] > 0, lambda x: (2 * x, 1.0), lambda x: (x, 2.0), x)[0],
        X, Y),
    "custom_vjp": (weighted, X, Y, W), "derivative of a custom_vjp": (of_weighted, X, Y, W),
    "cond": (lambda x, y: lax.cond(x[0, 0, 0] > 0, lambda a, b: a + b, lambda a, b: a, x, y), X, Y),
    "checkpoint": (jax.checkpoint(lambda x, y: jnp.sin(x) @ y[0].T), X, Y),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), X), "softmax": (jax.nn.softmax, X),
    "layer norm": (lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True), X),
}  # fmt: skip


def whole_program(function, args):
    return Program(inline_all(jax.make_jaxpr(function)(*args)))


def axes_of(program):
    """Every independent axis of every input, as (input, axis, slices)."""
    for i, v in enumerate(program.jaxpr.invars):
        for axis in range(v.aval.ndim):
            if v.aval.shape[axis] > 1:
                try:
                    yield i, axis, sliced(program, {v: axis}, independent_axes)
                except Dependent:
                    continue


def part(x, axis, start, stop, parts):
    unit = x.shape[axis] // parts
    return lax.slice_in_dim(x, start * unit, stop * unit, axis=axis)


def from_slices(program, slices, size, args):
    """The results that have the axis or are sums over it, from one slice after the other."""
    values = dict(zip(program.jaxpr.invars, args, strict=True))
    before = program.cut(slices.before)
    made = evaluate(before)(*(values[v] for v in before.invars))
    values |= dict(zip(before.outvars, made, strict=True))
    wanted = [v for v in dict.fromkeys(program.jaxpr.outvars) if v in slices.made]
    numbers = [jnp.arange(*x.shape, dtype=x.dtype) for x in counted(slices)]
    made = []
    for start in range(0, slices.parts, size):
        stop = min(start + size, slices.parts)
        run = evaluate(slice_program(slices, Fraction(stop - start, slices.parts), wanted))
        cut = [(values[v], axis) for v, axis in slices.given] + [(x, 0) for x in numbers]
        pieces = [part(x, axis, start, stop, slices.parts) for x, axis in cut]
        made.append(run(*(values[v] for v in slices.whole), *pieces))
    for i, v in enumerate(wanted):
        pieces = [each[i] for each in made]
        yield v, sum(pieces) if v in slices.sums else jnp.concatenate(pieces, slices.axes[v])


def check(function, args):
    """Compare slices with the whole, for each axis and size of a slice; return how many."""
    program = whole_program(function, args)

    @jax.jit  # one program is compiled, and not each operator for each shape
    def pairs(*args):
        whole = dict(zip(program.jaxpr.outvars, evaluate(program.jaxpr)(*args), strict=True))
        return [
            (x, whole[v])
            for _, _, slices in axes_of(program)
            for size in range(1, slices.parts)  # the last slice is shorter where it divides nothing
            for v, x in from_slices(program, slices, size, args)
        ]

    compared = pairs(*args)
    for found, wanted in compared:
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)
        assert found.dtype == wanted.dtype
    return len(compared)


@pytest.mark.parametrize("name", SAMPLES)
def test_slices_are_those_of_the_whole(name):
    function, *args = SAMPLES[name]
    assert check(function, [jnp.asarray(x) for x in args])


@pytest.mark.parametrize(
    ("primitive", "rule", "name"),
    [
        ("rev", "elementwise", "rev"),
        ("cumsum", "elementwise", "cumsum"),
        ("cummax", "elementwise", "cummax"),
        ("sort", "elementwise", "sort"),
        ("reduce_max", "sum_of_axes", "max"),
        ("fft", "elementwise", "fft of two"),
    ],
)
def test_a_wrong_rule_is_found(monkeypatch, primitive, rule, name):
    """The comparison above is one that can fail."""
    row = primitives._TABLE[primitive]
    wrong = dataclasses.replace(row, axes=getattr(axis_rules, rule))
    monkeypatch.setitem(primitives._TABLE, primitive, wrong)
    function, *args = SAMPLES[name]
    with pytest.raises((AssertionError, TypeError, ValueError)):
        check(function, args)


def axes(function, *args):
    """For each input, the axes that are independent, with how many parts they have."""
    found = {}
    for i, axis, slices in axes_of(whole_program(function, args)):
        found.setdefault(i, {})[axis] = slices.parts
    return found


def test_the_axes_that_are_found():
    assert axes(lambda x: lax.cumsum(x, 1), X) == {0: {0: 2, 2: 3}}
    assert axes(lambda x: x.reshape(4, 6), X) == {0: {0: 2}}
    assert axes(lambda x: x.reshape(8, 3), X) == {0: {0: 2, 2: 3}}
    assert axes(lambda x: jax.nn.softmax(x, -1), X) == {0: {0: 2, 1: 4}}
    attention = lambda q, k, v: jax.nn.softmax(q @ k.T) @ v  # noqa: E731
    assert axes(attention, X[0], Y[0], Y[0]) == {0: {0: 4, 1: 3}, 1: {1: 3}, 2: {0: 4, 1: 3}}
    normalised = lambda x: (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True)  # noqa: E731
    assert axes(normalised, X) == {0: {1: 4, 2: 3}}
    assert axes(lambda x: lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x), X) == {}
    assert axes(lambda x: (jax.debug.print("{}", x), x * 2)[1], X) == {}
    assert axes(lambda x: x @ x.T, X[0]) == {0: {1: 3}}
    assert axes(lambda x: lax.reshape(x, (8, 3), (1, 0, 2)), X) == {0: {1: 4, 2: 3}}
    kernels, *images = SAMPLES["gradients of each example's kernel"]
    assert axes(kernels, *images)[1][0] == len(IMAGE)
    grouped, *images = SAMPLES["grouped batches"]
    assert axes(grouped, *images)[0][0] == 2


def test_a_merge_of_axes_has_the_parts_of_the_first():
    """Contiguous slices of the merged axis are slices of the first one."""
    found = axes(lambda x: x.reshape(6, 4) * 2, jnp.ones((4, 6)))
    assert found == {0: {0: math.gcd(4, 6)}}
