"""How long functions, sorts and factorisations take: compiled programs and equations agree."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._planner.costs.compilers import CPU
from jrc.remat._planner.costs.cost_unit import TimeUnit
from jrc.remat._time.kernel import kernel_of
from jrc.remat._time.rates import Rates
from jrc.remat._time.roofline import roofline_seconds

# Nothing takes time but what is computed: a second for each value of tanh.
COMPUTED = Rates(products=1e30, convolutions=1e30, functions=1.0, bandwidth=1e30, launch=0.0)
SQUARE = jnp.eye(64)[None].repeat(3, 0)


def compiled(fn, *args):
    return parse_hlo(jax.jit(fn).lower(*args).compile().as_text())


@pytest.mark.parametrize(
    ("fn", "tanhs"),
    [
        (jnp.tanh, 1),
        (jnp.sin, 4),
        (lax.log1p, 2),
        (lambda x: x**2.5, 10),
        (lambda x: jnp.tanh(jnp.cos(x)), 5),
    ],
)
def test_a_function_takes_so_many_times_as_long_as_tanh(fn, tanhs):
    x = jnp.ones(1000)
    expected = pytest.approx(1000 * tanhs)
    assert roofline_seconds(compiled(fn, x), COMPUTED) == expected
    unit = TimeUnit(COMPUTED, CPU)
    assert unit.seconds(unit.total(jax.make_jaxpr(fn)(x).jaxpr)) == expected


def test_arithmetic_takes_time_where_bytes_do_not():
    """Distances of all pairs are in no memory: 3 operations of each entry, and a minimum."""
    n, features = 64, 5
    fn = lambda x: jnp.min(jnp.sum(jnp.abs(x[:, None] - x[None]), -1), 1)  # noqa: E731
    expected = pytest.approx((3 * features + 1) * n**2 / 8, rel=0.02)
    assert roofline_seconds(compiled(fn, jnp.ones((n, features))), COMPUTED) == expected


def test_windows_take_as_long_as_all_that_is_in_them():
    fn = lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 5), (1, 1), "VALID")  # noqa: E731
    found = roofline_seconds(compiled(fn, jnp.ones((66, 68))), COMPUTED)
    assert found == pytest.approx(15 * 64**2, rel=0.02)


@pytest.mark.parametrize("fn", [lambda x: lax.rem(x, jnp.int32(7)), lambda x: x // 7])
def test_functions_of_whole_numbers_are_arithmetic(fn):
    x = jnp.arange(1000)
    unit = TimeUnit(COMPUTED, CPU)
    assert unit.seconds(unit.total(jax.make_jaxpr(fn)(x).jaxpr)) < 2 * x.size
    assert roofline_seconds(compiled(fn, x), COMPUTED) <= x.size


def test_a_remainder_of_floats_takes_long():
    x = jnp.ones(1000)
    fn = lambda x: lax.rem(x, jnp.float32(0.7))  # noqa: E731
    unit = TimeUnit(COMPUTED, CPU)
    assert unit.seconds(unit.total(jax.make_jaxpr(fn)(x).jaxpr)) == pytest.approx(40_000)
    assert roofline_seconds(compiled(fn, x), COMPUTED) == pytest.approx(40_000)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("operands", [1, 2])
def test_a_sort_takes_as_long_as_its_comparisons(axis, operands):
    """They are n log2 n in each row, along whichever axis."""
    x = jnp.ones((4, 32, 1024))
    fn = lambda *each: lax.sort(each, dimension=axis, num_keys=1)  # noqa: E731
    args = [x] * operands
    expected = pytest.approx(25 * x.size * {0: 2, 1: 5, 2: 10}[axis])
    assert roofline_seconds(compiled(fn, *args), COMPUTED) == expected
    unit = TimeUnit(COMPUTED, CPU)
    assert unit.seconds(unit.total(jax.make_jaxpr(fn)(*args).jaxpr)) == expected


@pytest.mark.parametrize(
    ("fn", "args", "operations"),
    [
        (lambda a: lax.linalg.cholesky(a, symmetrize_input=False), [SQUARE], 64**3 / 3),
        (
            lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
            [SQUARE, jnp.ones((3, 64, 5))],
            64**2 * 5,
        ),
        (lax.linalg.lu, [SQUARE], 2 * 64**3 / 3),
        (jnp.linalg.eigvalsh, [SQUARE], 9 * 64**3),
        (jnp.fft.fft, [jnp.ones((3, 64, 64), jnp.complex64)], 5 * 64**2 * 6),
    ],
)
def test_factorisations_take_as_long_as_their_operations(fn, args, operations):
    """They are calls of a library, which the compiled program names."""
    found = roofline_seconds(compiled(fn, *args), COMPUTED)
    assert found == pytest.approx(3 * operations / 8, rel=0.12)  # what stands beside the calls
    unit = TimeUnit(COMPUTED, CPU)
    of_equations = unit.seconds(unit.total(jax.make_jaxpr(fn)(*args).jaxpr))
    assert of_equations == pytest.approx(3 * operations / 8, rel=0.35)


def test_the_largest_of_many_take_comparisons_by_how_many_are_wanted():
    x = jnp.ones((6, 500))
    fn = lambda x: lax.top_k(x, 7)  # noqa: E731
    module = compiled(fn, x)
    target = next(each for each in module.entry.instructions if each.opcode == "custom-call")
    assert kernel_of(module, module.entry, target).functions == pytest.approx(2 * x.size * 3)
    unit = TimeUnit(COMPUTED, CPU)
    assert unit.seconds(unit.total(jax.make_jaxpr(fn)(x).jaxpr)) == pytest.approx(2 * x.size * 3)


def test_kernels_of_a_small_loop_are_one_function_of_xla_for_cpus():
    """It launches none of them: 100 steps of a recurrence of 8 entries took 5 ns a kernel."""

    def steps(x):
        return lax.fori_loop(0, 100, lambda _, y: y / (1e-3 + jnp.sum(y)), x)

    rates = dataclasses.replace(COMPUTED, functions=1e30, launch=1.0)
    small, large = (roofline_seconds(compiled(steps, jnp.ones(n)), rates) for n in (8, 2**18))
    assert small < 10 and large >= 200
