"""Programs that are equal but for the names of their variables, as those of equal layers are.

>>> import jax, jax.numpy as jnp
>>> one, other = (jax.make_jaxpr(lambda x: jnp.sin(x * 2))(1.0) for _ in range(2))
>>> one is other, program_key(one) == program_key(other)
(False, True)
"""

from typing import Any

from jax.extend.core import Jaxpr

from jrc._jaxpr.equations import walk

_RULES = ("fwd_jaxpr_thunk", "jvp_jaxpr_fun")


def program_key(jaxpr: Jaxpr) -> Any:
    """Return a key that is equal for programs with the same equations.

    Values of constants do not count; functions with rules of their own are told apart by them.
    """
    rules = [id(eqn.params[key]) for eqn, _ in walk(jaxpr) for key in _RULES if key in eqn.params]
    return str(jaxpr), tuple(rules)
