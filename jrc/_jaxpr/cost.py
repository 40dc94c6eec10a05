"""Bytes and floating-point operations, counted in the program itself.

XLA's own count takes a loop's body once; this one multiplies by the length. A `while` loop of
unknown length counts once, a `cond` counts its dearest branch, and what no result needs is not
counted. A Pallas kernel costs what its author states, or else its body for each cell of the grid.
A multiplication and an addition are two operations; a transcendental function is one an
element. Moving data is free.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jrc._jaxpr.dce import Alive, alive
from jrc._jaxpr.equations import inner_programs, primitive_name, repeats

# Operators that only move or name data, or make it from nothing.
_FREE = frozenset(
    "mark gate name CheckpointName reshape broadcast_in_dim transpose squeeze slice dynamic_slice "
    "dynamic_update_slice concatenate pad gather scatter rev copy device_put iota empty "
    "convert_element_type bitcast_convert_type reduce_precision stop_gradient complex real imag "
    "sharding_constraint split expand_dims optimization_barrier random_wrap random_unwrap "
    "random_seed random_split random_fold_in axis_index all_gather all_to_all ppermute pvary "
    "pcast debug_callback create_token get swap masked_load masked_swap program_id".split()
)


def nbytes(aval: Any) -> int:
    """Bytes of an array of this type; a typed key counts its words, a token nothing."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * itemsize


def flops(jaxpr: Jaxpr) -> int:
    """Floating-point operations of one run of a program, without what no result needs."""
    return live_flops(alive(jaxpr))


def live_flops(program: Sequence[Alive]) -> int:
    """Floating-point operations of equations that are known to be alive."""
    return sum(_flops(node.eqn, list(map(live_flops, node.inside))) for node in program)


def equation_flops(eqn: JaxprEqn) -> int:
    """Floating-point operations of one equation, its inner programs included."""
    return _flops(eqn, list(map(flops, inner_programs(eqn))))


def _flops(eqn: JaxprEqn, inner: Sequence[int]) -> int:
    name = primitive_name(eqn)
    stated = eqn.params.get("cost_estimate") if name == "pallas_call" else None
    if stated is not None:
        return int(stated.flops + stated.transcendentals)
    if inner:
        once = max(inner) if name == "cond" else sum(inner)
        return once * repeats(eqn)
    return 0 if name in _FREE else _RULES.get(name, _elementwise)(eqn)


def _size(atom: Any) -> int:
    return math.prod(_shape(atom))


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _elementwise(eqn: JaxprEqn) -> int:
    """One operation an element of the larger side: also right for reductions and scatters."""
    return max([_size(atom) for atom in (*eqn.invars, *eqn.outvars)], default=0)


def _dot_general(eqn: JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = _shape(eqn.invars[0])
    return 2 * _size(eqn.outvars[0]) * math.prod(shape[axis] for axis in contracted)


def _convolution(eqn: JaxprEqn) -> int:
    kernel = _shape(eqn.invars[1])
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _size(eqn.outvars[0]) * (math.prod(kernel) // max(features, 1))


def _sort(eqn: JaxprEqn) -> int:
    length = _shape(eqn.invars[0])[eqn.params["dimension"]]
    return _size(eqn.invars[0]) * max(1, math.ceil(math.log2(max(length, 2))))


_RULES: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "sort": _sort,
}
