"""A slice of one axis of a value, and the equations that take it and that pad it with zeros.

>>> import jax, jax.numpy as jnp
>>> (x,) = jax.make_jaxpr(jnp.sin)(jnp.ones((4, 3))).invars
>>> taken = slice_equation(x, AxisSlice(axis=0, start=1, limit=3))
>>> taken.outvars[0].aval.shape
(2, 3)
>>> padded = pad_equation(taken.outvars[0], x, AxisSlice(axis=0, start=1, limit=3))
>>> padded.outvars[0] is x, padded.params["padding_config"]
(True, ((1, 1, 0), (0, 0, 0)))
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jrc._jaxpr.atoms import shape_of


class AxisSlice(NamedTuple):
    """A slice of a value: entries `start` to `limit` of an axis."""

    axis: int
    start: int
    limit: int

    def along(self, axis: int) -> "AxisSlice":
        """Return the same entries of another axis."""
        return self._replace(axis=axis)


def slice_equation(x: Var, part: AxisSlice) -> JaxprEqn:
    """Return the equation that takes a slice of a value, with a new variable."""
    shape = list(shape_of(x))
    starts, limits = [0 for _ in shape], list(shape)
    starts[part.axis], limits[part.axis] = part.start, part.limit
    shape[part.axis] = part.limit - part.start
    made = jax.make_jaxpr(lambda x: jax.lax.slice(x, starts, limits))(_plain(x))
    return made.eqns[0].replace(invars=[x], outvars=[Var(x.aval.update(shape=tuple(shape)))])


def pad_equation(x: Any, result: Var, part: AxisSlice) -> JaxprEqn:
    """Return the equation that makes a value of a slice of it, the rest of which is zero."""
    config = [(0, 0, 0) for _ in shape_of(result)]
    config[part.axis] = part.start, shape_of(result)[part.axis] - part.limit, 0
    aval: Any = result.aval
    zero = np.zeros((), aval.dtype)
    made = jax.make_jaxpr(lambda x: jax.lax.pad(x, zero, config))(_plain(x))
    (eqn,) = made.eqns
    literal = Literal(zero, jax.typeof(zero))
    return eqn.replace(invars=[x, literal], outvars=[result])


def lies_across(v: Any, axis: int) -> bool:
    """Return whether the type of a value says that an axis is split over devices."""
    spec = tuple(getattr(getattr(v.aval, "sharding", None), "spec", ()))
    return spec[axis : axis + 1] not in ((), (None,))


def _plain(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape_of(x), x.aval.dtype)
