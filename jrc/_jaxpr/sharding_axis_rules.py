"""The axes along which an equation that places a value on a mesh computes each slice by itself."""

import math
from typing import Any

from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

from jrc._jaxpr.atoms import shape_of
from jrc._jaxpr.axis_rules import IndependentAxis, elementwise
from jrc._specs import names_of, padded, trimmed


def constraint(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes that a sharding constraint leaves whole on each device."""
    sharding = eqn.params.get("sharding")
    if not isinstance(sharding, NamedSharding):
        return []
    sizes = sharding.mesh.shape

    def is_split(names: Any) -> bool:
        each = names if isinstance(names, tuple) else () if names is None else (names,)
        return math.prod(sizes.get(name, 2) for name in each) > 1

    return elementwise(eqn, [axis for axis, n in enumerate(sharding.spec) if is_split(n)])


def reshard(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes that are split over the same axes of an explicit mesh before and after.

    There are none where a value enters or leaves a part of the program on automatic axes.
    """
    kinds = {x.aval.sharding.mesh.axis_types for x in (*eqn.invars, *eqn.outvars)}  # type: ignore[attr-defined]
    if len(kinds) > 1:
        return []
    rank = len(shape_of(eqn.outvars[0]))
    before, after = (
        padded(trimmed(x.aval.sharding.spec), rank)  # type: ignore[attr-defined]
        for x in (eqn.invars[0], eqn.outvars[0])
    )
    moved = [i for i in range(rank) if names_of(before[i]) != names_of(after[i])]
    return elementwise(eqn, moved)
