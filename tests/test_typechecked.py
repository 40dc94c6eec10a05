"""The annotations of `jrc` are checked while tests run, and change nothing else."""

import inspect
import os
import random

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import jrc
from jrc.dgc._momentum import Momentum
from jrc.remat._policy.rules import Save
from tests import typechecked
from tests.processes import run_python

pytestmark = pytest.mark.skipif(
    "JRC_NO_TYPE_CHECKS" in os.environ, reason="the checks are switched off"
)


@pytest.fixture
def checks_on():
    typechecked.switch(True)
    typechecked.begin_again()


def test_a_wrong_type_is_found(checks_on):
    with pytest.raises(jaxtyping.TypeCheckError, match="parameters of jrc.remat.*mark"):
        jrc.mark(1.0, 3)


def test_a_wrong_dtype_is_found(checks_on):
    row = jnp.zeros((1, 4))
    Momentum(0.9).step(row, row)
    with pytest.raises(jaxtyping.TypeCheckError, match="Momentum.*step"):
        Momentum(0.9).step(row.astype(jnp.int32), row)


def test_a_shape_that_differs_from_another_argument_s_is_found(checks_on):
    with pytest.raises(jaxtyping.TypeCheckError, match="Momentum.*step"):
        Momentum(0.9).step(jnp.zeros((1, 4)), jnp.zeros((1, 5)))


def test_a_wrong_field_of_a_dataclass_is_found(checks_on):
    for _ in range(2):
        Momentum(0.9)
    with pytest.raises(jaxtyping.TypeCheckError, match="Momentum.*__init__"):
        Momentum("0.9")


def test_a_test_that_expects_an_error_runs_without_them():
    with pytest.raises(TypeError):
        jrc.plan(3)
    assert jaxtyping.config.jaxtyping_disable


def test_functions_inside_of_functions_are_left_as_they_are():
    def loss(x):
        return jnp.sum(jnp.tanh(x))

    applied = jrc.apply_rules(loss, Save("a"))
    assert typechecked.__file__ != inspect.getsourcefile(applied)
    assert typechecked.__file__ == jrc.apply_rules.__wrapped__.__code__.co_filename


def test_the_first_calls_of_a_function_are_checked(checks_on):
    row, step = jnp.zeros((1, 4)), Momentum(0.9).step
    for _ in range(typechecked.CHECKED_CALLS - 1):
        step(row, row)
    with pytest.raises(jaxtyping.TypeCheckError, match="Momentum.*step"):
        step(row, jnp.zeros((1, 4), jnp.int32))
    step(row, jnp.zeros((1, 4), jnp.int32))


def test_checks_leave_the_random_numbers_of_a_test_alone(checks_on):
    random.seed(1)
    before = random.getstate()
    jrc.remat.SavePrimitives("tanh", "exp")
    jrc.dgc.choose_each(lambda leaf, k: jnp.arange(k), [jnp.ones(3)], [2], jrc.dgc.Space((3,)))
    assert random.getstate() == before


def test_source_lines_are_the_user_s():
    def loss(x):
        return jnp.sum(jrc.mark(jnp.tanh(x), "t") ** 2)

    report = str(jrc.explain(loss, jax.ShapeDtypeStruct((4,), jnp.float32)))
    assert "test_typechecked.py" in report and "_decorator.py" not in report
    assert "tests/typechecked.py" not in report


@pytest.mark.slow
def test_they_can_be_left_out():
    assert typechecked.__file__ == jrc.mark.__wrapped__.__code__.co_filename
    code = "from tests import typechecked; typechecked.install(); import jrc; jrc.mark(1.0, 'x')"
    code += "; print(typechecked.__file__ == jrc.mark.__wrapped__.__code__.co_filename)"
    assert run_python(code, JRC_NO_TYPE_CHECKS="1").strip() == "False"
