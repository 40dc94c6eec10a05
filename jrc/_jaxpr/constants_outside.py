"""Arrays that functions inside of loops, branches and regions close over become operands of these.

A function under `jax.jit` has them as constants of its own program. JAX makes operands of those
that a loop's body closes over itself.

>>> import jax, jax.numpy as jnp, numpy as np
>>> masked = jax.jit(lambda x: x * np.arange(3.0))
>>> loop = lambda xs: jax.lax.map(masked, xs)
>>> jaxpr = jax.make_jaxpr(loop)(jnp.ones((2, 3)))
>>> len(jaxpr.eqns[0].invars), len(with_constants_outside(jaxpr).eqns[0].invars)
(1, 2)
"""

import itertools

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jrc._jaxpr.atoms import is_variable, shape_of
from jrc._jaxpr.control_flow import Run, can_rebuild, rebuild
from jrc._jaxpr.equations import (
    inner_program,
    inner_programs,
    is_differentiated_region,
    region_around,
)
from jrc._jaxpr.inline import inline_marked, splice
from jrc._jaxpr.primitives import facts_of
from jrc._jaxpr.program import evaluate


def with_constants_outside(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program with arrays that programs inside have as constants as operands of these.

    Functions with a derivative of their own, regions of a backward pass and calls that are not
    inlined, because they are tagged, keep theirs.
    """
    new = [_again(eqn) if _holds_arrays(eqn) else [eqn] for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=list(itertools.chain(*new)))


def _holds_arrays(eqn: JaxprEqn) -> bool:
    is_region = facts_of(eqn).is_region and not is_differentiated_region(eqn)
    is_entered = is_region or can_rebuild(eqn) and eqn.primitive.name != "jit"
    return is_entered and any(_has_arrays(_inlined(each)) for each in inner_programs(eqn))


def _has_arrays(jaxpr: Jaxpr) -> bool:
    """Whether a program without calls reads arrays of its own, or an equation of it does."""
    own = (x for eqn in jaxpr.eqns for x in eqn.invars if not is_variable(x))
    constants = (*jaxpr.constvars, *own)
    return any(map(shape_of, constants)) or any(map(_holds_arrays, jaxpr.eqns))


def _again(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The equation, traced once more: JAX makes operands of arrays that a function closes over."""
    run = rebuild(eqn, _run) if can_rebuild(eqn) else region_around(eqn, _run(inner_program(eqn)))
    new = jax.make_jaxpr(run)(*(x.aval for x in eqn.invars))
    eqns, results = splice(new, eqn.invars)
    if not eqns or list(eqns[-1].outvars) != results:
        return [eqn]
    eqns[-1] = eqns[-1].replace(outvars=eqn.outvars)
    return [each.replace(source_info=eqn.source_info) for each in eqns]


def _run(inner: Jaxpr) -> Run:
    # Inside of a `shard_map` only while the axes of its mesh have names.
    return lambda *args: evaluate(with_constants_outside(_inlined(inner)))(*args)


def _inlined(jaxpr: Jaxpr) -> Jaxpr:
    return inline_marked(jaxpr, lambda _: True)
