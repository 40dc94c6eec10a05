"""The policy that saves values by their names."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import jrc
from jrc.remat._policy.checkpoint_names import SAVED, checkpoint_policy
from tests.draws import normal

odd_p = Primitive("odd")
odd_p.def_impl(lambda x, *, prim: jnp.sin(x))
odd_p.def_abstract_eval(lambda x, *, prim: x)
ad.deflinear2(odd_p, lambda ct, x, *, prim: [2 * ct])
mlir.register_lowering(odd_p, mlir.lower_fun(lambda x, *, prim: 2 * x, multiple_results=False))


def layers(w, x):
    for _ in range(3):
        x = odd_p.bind(jnp.tanh(checkpoint_name(x @ w, SAVED)), prim="a parameter called so")
    return jnp.sum(x**2)


def test_a_primitive_may_have_a_parameter_that_is_called_prim():
    """Those of equinox that choose a value by a predicate have one: JAX's own policy raises."""
    w, x = normal(0, 16, 16), normal(1, 64, 16)
    wanted = jax.grad(layers)(w, x)
    found = jax.grad(jax.checkpoint(layers, policy=checkpoint_policy([SAVED])))(w, x)
    assert jnp.allclose(found, wanted)


def test_such_a_program_is_planned():
    w, x = normal(0, 64, 64), normal(1, 4096, 64)
    plan = jrc.plan(layers, w, x, budget=0.0)
    assert plan.verified.peak_bytes <= plan.budget
    assert jnp.allclose(jax.grad(plan.apply(layers))(w, x), jax.grad(layers)(w, x), rtol=1e-4)
