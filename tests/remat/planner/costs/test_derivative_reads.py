"""What JAX says that derivatives read is kept, for equations that are the same."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad

from jrc._jaxpr import Program
from jrc.remat._planner.costs.derivative_reads import DerivativeReads


def reads(primitive, **params):
    """How many values the derivative of an equation of a primitive reads."""
    program = Program(jax.make_jaxpr(lambda x: primitive.bind(x, **params))(jnp.ones(3)))
    return len(DerivativeReads().of(program, 0, set(program.jaxpr.invars)).variables)


def primitive_of(slope):
    """A primitive, always of the same name, with a derivative."""
    primitive = Primitive("my_op")
    primitive.def_abstract_eval(lambda x, **_: x)
    ad.primitive_jvps[primitive] = lambda xs, ts, **params: (
        primitive.bind(*xs, **params),
        ts[0] * slope(xs[0], **params),
    )
    return primitive


class Function:
    """A parameter whose text does not say what it does."""

    def __init__(self, slope):
        self.slope = slope

    def __repr__(self):
        return "Function"


@pytest.mark.parametrize("is_linear_first", [True, False])
def test_equal_texts_of_different_equations(is_linear_first):
    slopes = [lambda x: 2.0, jnp.cos]
    wanted = [0, 1]
    if not is_linear_first:
        slopes, wanted = slopes[::-1], wanted[::-1]
    assert [reads(primitive_of(slope)) for slope in slopes] == wanted
    applied = primitive_of(lambda x, f: f.slope(x))
    assert [reads(applied, f=Function(slope)) for slope in slopes] == wanted
