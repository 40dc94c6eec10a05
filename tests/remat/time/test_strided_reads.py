"""What loops of compiled programs read in steps, for programs that are compiled here."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._time.kernel import kernel_of
from jrc.remat._time.rates import Rates
from jrc.remat._time.roofline import roofline_seconds

ROWS, COLUMNS = 512, 256
N = ROWS * COLUMNS
WIDE = jnp.ones((ROWS, COLUMNS))
PLAIN = Rates(1e20, 1e20, 1e20, 1e20, 0.0)


def compiled(fn, *args):
    return parse_hlo(jax.jit(fn).lower(*args).compile().as_text())


def strided(fn, *args):
    """All entries that are read in steps: a second for each is all that anything takes."""
    return round(roofline_seconds(compiled(fn, *args), dataclasses.replace(PLAIN, strided=1.0)))


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (lambda a, b: (a * b + 1).T, (WIDE, WIDE + 1), 2 * N),
        (lambda a, b: 2 * a.T + b, (WIDE, WIDE.T), N),
        (lambda a, b: a * b + 1, (WIDE, WIDE + 1), 0),
        # In tiles: nothing is broadcast, cut or joined.
        (lambda a, b: (a * b).T, (WIDE, WIDE + 1), 0),
        (lambda a, b: jnp.where(a > b, jnp.tanh(a), b).T, (WIDE, WIDE + 1), 0),
        (lambda a, b: jnp.concatenate([a * a, b]).T, (WIDE, WIDE + 1), 4 * N),
        (lambda a: a.T, (WIDE,), 0),
        (lambda a, b: (a * b[:, None]).T, (WIDE, jnp.ones(ROWS)), N),
        (lambda a, b: (a * b[None]).T, (WIDE, jnp.ones(COLUMNS)), N),
        (lambda a: (a[::2] * 2).T, (WIDE,), N // 2),
        (lambda a: (a * 2).T, (WIDE[:16],), 0),  # it stays in the cache
        (lambda a: (a.reshape(8, 64, 256) * 2).transpose(1, 0, 2), (WIDE,), 0),
        (lambda a: (a.reshape(8, 64, 256) * 2).transpose(2, 0, 1), (WIDE,), N),
        (lambda a: (a.reshape(8, 64, 256) * 2).transpose(0, 2, 1), (WIDE,), N),
        (lambda a: ((a + 1).T, a - 1), (WIDE,), 0),  # computed in order, then copied
        (lambda a: (a * jnp.arange(256.0)[None]).T, (WIDE,), 0),
        (lambda a: (a * 2).reshape(256, 512), (WIDE,), 0),
        (lambda a: jnp.float32(2) * a[0, 0], (WIDE,), 0),
    ],
)
def test_entries_that_are_read_in_steps(fn, args, expected):
    assert strided(fn, *args) == expected


@pytest.mark.parametrize(
    ("rows", "columns", "cache"),
    [(512, 256, 512 * 1024), (512, 384, 512 * 512), (512, 250, 512 * 64), (2048, 64, 2048 * 256)],
)
def test_rows_a_power_of_two_apart_share_places_of_the_cache(rows, columns, cache):
    fn = lambda a, b: (a * b[:, None]).T  # noqa: E731
    module = compiled(fn, jnp.ones((rows, columns)), jnp.ones(rows))
    kernels = (kernel_of(module, module.entry, i) for i in module.entry.instructions)
    assert [each.strided for each in kernels if each] == [{cache: rows * columns}]
    # Columns that stay in a cache are read faster.
    rates = [dataclasses.replace(PLAIN, strided={cache // 2: 2.0, 2 * cache: n}) for n in (0.5, 2)]
    assert [round(roofline_seconds(module, each)) for each in rates] == [
        rows * columns,
        rows * columns // 2,
    ]


def test_a_loop_counts_as_often_as_it_runs():
    once = lambda a: (a * 2).T  # noqa: E731
    square = jnp.ones((ROWS, ROWS))
    looped = lambda a: jax.lax.fori_loop(0, 5, lambda i, b: once(b), a)  # noqa: E731
    assert strided(looped, square) == 5 * strided(once, square) > 0


def test_a_gradient_with_no_regions_reads_the_cotangents_of_all_layers_in_steps():
    """The cotangent of a residual is a sum over the layers above: each weight reads all of it."""
    weights, x = [jnp.ones((COLUMNS, COLUMNS))] * 6, WIDE.reshape(8, 64, COLUMNS)

    def loss(weights, x, layer):
        for w in weights:
            x = layer(x, w)
        return jnp.sum(x)

    layer = lambda x, w: x + jnp.tanh(x) @ w  # noqa: E731
    as_it_is = strided(jax.grad(lambda w, x: loss(w, x, layer)), weights, x)
    in_regions = strided(jax.grad(lambda w, x: loss(w, x, jax.checkpoint(layer))), weights, x)
    assert in_regions < as_it_is / 2


def test_functions_of_a_kernel_are_counted_with_what_is_fused():
    module = compiled(lambda a: jnp.exp(jnp.tanh(a * 2) + 1), WIDE)
    (kernel,) = filter(
        None, (kernel_of(module, module.entry, i) for i in module.entry.instructions)
    )
    expected = 2.25 * N  # a tanh, an exponential, a product and a sum of each entry
    assert kernel.functions == expected
    slow = dataclasses.replace(PLAIN, functions=1.0)
    assert roofline_seconds(module, slow) == pytest.approx(expected)
