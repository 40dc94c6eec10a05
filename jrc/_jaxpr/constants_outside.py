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

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jrc._jaxpr.atoms import shape_of
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

    Functions with a derivative of their own, and regions of a backward pass, keep theirs.
    """
    if not any(map(_holds_arrays, jaxpr.eqns)):
        return jaxpr
    eqns = [new for eqn in jaxpr.eqns for new in (_again(eqn) if _holds_arrays(eqn) else [eqn])]
    return jaxpr.replace(eqns=eqns)


def _holds_arrays(eqn: JaxprEqn) -> bool:
    is_entered = can_rebuild(eqn) or _is_region(eqn)
    return is_entered and any(map(_has_arrays, inner_programs(eqn)))


def _is_region(eqn: JaxprEqn) -> bool:
    return facts_of(eqn).is_region and not is_differentiated_region(eqn)


def _has_arrays(jaxpr: Jaxpr) -> bool:
    return any(map(shape_of, jaxpr.constvars)) or any(map(_holds_arrays, jaxpr.eqns))


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
