"""Transposed operands and reductions over all axes: equal results in the form for chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jrc._jaxpr import (
    Program,
    copy_for_readers,
    dimension_numbers,
    evaluate,
    form_for_chunks,
    inline_all,
    reductions_over_several,
)

LENGTHS = (2, 3, 5, 7)


def program_of(function, *args):
    return Program(inline_all(jax.make_jaxpr(function)(*args)))


def live_names(program):
    pairs = zip(program.eqns, program.live(), strict=True)
    return [eqn.primitive.name for eqn, is_live in pairs if is_live]


@st.composite
def products(draw):
    """A product of operands that are transposed, perhaps twice."""
    kinds = draw(st.lists(st.sampled_from(["batch", "contracted", "left", "right"]), max_size=5))
    lengths = [draw(st.sampled_from(LENGTHS)) for _ in kinds]
    has = {"batch": (True, True), "contracted": (True, True),
           "left": (True, False), "right": (False, True)}  # fmt: skip
    axes, shapes, turns = [], [], []
    for side in (0, 1):
        mine = [i for i, kind in enumerate(kinds) if has[kind][side]]
        order = draw(st.permutations(mine))
        axes.append(order)
        turns.append([draw(st.permutations(range(len(order))))
                      for _ in range(draw(st.integers(0, 2)))])  # fmt: skip
        shapes.append([lengths[i] for i in order])
    inputs = []
    for shape, steps in zip(shapes, turns, strict=True):
        for step in reversed(steps):  # the shape in front of the transpositions
            shape = [shape[step.index(i)] for i in range(len(shape))]
        inputs.append(np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32))
    numbers = tuple(
        tuple(tuple(order.index(i) for i, k in enumerate(kinds) if k == kind) for order in axes)
        for kind in ("contracted", "batch")
    )

    def run(*operands):
        for side, steps in enumerate(turns):
            for step in steps:
                x = lax.transpose(operands[side], step)
                operands = (x, operands[1]) if side == 0 else (operands[0], x)
        return lax.dot_general(*operands, numbers)

    return run, inputs


@given(products())
@settings(max_examples=40, deadline=None)
def test_a_product_of_transposed_operands(case):
    run, inputs = case
    program = program_of(run, *inputs)
    new = form_for_chunks(program)
    assert form_for_chunks(program) is new and len(new.eqns) == len(program.eqns)
    wanted, (found,) = run(*inputs), evaluate(new.jaxpr)(*inputs)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_logits_of_tied_embeddings_read_them_as_they_lie():
    loss = lambda E, h: jnp.sum(jax.nn.logsumexp(h @ E.T, axis=-1))  # noqa: E731
    new = form_for_chunks(program_of(loss, jnp.ones((50, 4)), jnp.ones((6, 4))))
    assert "transpose" not in live_names(new)
    assert dimension_numbers(new.eqns[1]) == (((1,), (1,)), ((), ()))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.T @ x,  # slices of the result read a slice of `x`, and all of it
        lambda x: lax.dot_general(x.reshape(4, 3, 2).T, x, (((), ()), ((), ()))),  # free axes turn
    ],
)
def test_where_an_operand_stays_transposed(fn):
    program = program_of(fn, jnp.ones((4, 6)))
    assert form_for_chunks(program) is program


@pytest.mark.parametrize("name", ["max", "min", "prod", "any", "all"])
def test_a_reduction_of_all_axes_in_two_steps(name):
    x = np.random.default_rng(0).normal(size=(1, 6, 5, 4)).astype(np.float32)
    x, other = (x > 0, jnp.any) if name in ("any", "all") else (x, jnp.sum)
    fn = lambda x: (getattr(jnp, name)(x), other(x, (0, 1, 3)))  # noqa: E731
    program = program_of(fn, x)
    new = form_for_chunks(program, reductions_over_several(program, ()))
    first, second = (eqn.outvars[0].aval.shape for eqn in new.eqns[:2])
    assert (first, second) == ((5,), ())  # along the axis that the other keeps
    np.testing.assert_allclose(evaluate(new.jaxpr)(x)[0], fn(x)[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("kind", ["distinct", "equal entries", "nan", "integers"])
def test_the_place_of_the_largest_of_all_in_two_steps(name, kind):
    x = np.random.default_rng(0).normal(size=(1, 6, 5, 4)).astype(np.float32)
    if kind == "equal entries":
        x = np.round(x)
    elif kind == "nan":
        x[0, 4, 3, 2] = x[0, 4, 3, 3] = np.nan
    elif kind == "integers":
        x = (10 * x).astype(np.int8)
    fn = lambda x: getattr(jnp, name)(x)  # noqa: E731
    program = program_of(fn, x)
    new = form_for_chunks(program, reductions_over_several(program, ()))
    assert (6,) in [eqn.outvars[0].aval.shape for eqn in new.eqns]
    (found,) = jax.jit(evaluate(new.jaxpr))(x)
    assert found.dtype == fn(x).dtype and found == fn(x) == getattr(np, name)(x)


def test_a_maximum_that_is_differentiated_stays():
    """Its derivative goes to equal entries in equal parts, in two steps it would not."""
    x = jnp.zeros((3, 4)).at[0].set(1.0).at[1, 0].set(1.0)
    program = program_of(jnp.max, x)
    assert reductions_over_several(program, program.jaxpr.outvars) == []
    assert reductions_over_several(program, ()) == [0]
    assert form_for_chunks(program) is program
    assert len(form_for_chunks(program, [0]).eqns) == 2


def test_a_reader_reads_the_copies_of_an_earlier_one_again():
    def fn(x):
        y = jnp.sin(x)
        return [y + 1, y + 2, y + 3, y + 4]

    program = program_of(fn, 0.5)
    new = copy_for_readers(program, [(2, [0], 2), (3, [0], 1), (4, [0], 2)])
    sines = [eqn.outvars[0] for eqn in new.eqns if eqn.primitive.name == "sin"]
    read = [eqn.invars[0] for eqn in new.eqns if eqn.primitive.name == "add"]
    assert read == [sines[0], sines[1], sines[0], sines[1]]
    np.testing.assert_allclose(evaluate(new.jaxpr)(0.5), fn(0.5))
