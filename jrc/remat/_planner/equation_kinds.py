"""Kinds of equations: what XLA fuses, what has an inside, what must not be run twice."""

from typing import Any

from jrc._jaxpr import acts, inner_programs, primitive_name, tag_of
from jrc.remat._policy.resolution import COLLECTIVES, KEPT
from jrc.remat._region.interpreter import is_closed

# Operators whose results XLA makes inside of whatever reads them, as often as they are read.
_FUSED = frozenset(
    "add sub mul div neg sign abs floor ceil round max min clamp select_n and or not xor eq ne lt "
    "le gt ge convert_element_type integer_pow square is_finite add_any broadcast_in_dim reshape "
    "squeeze expand_dims transpose slice rev pad iota mark gate name CheckpointName copy "
    "stop_gradient real imag reduce_precision shift_left shift_right_logical "
    "shift_right_arithmetic pvary pcast".split()
)
# Operators that take a pass over their arguments, and fuse with what stands next to them.
_LIGHT = _FUSED | frozenset(
    "exp exp2 expm1 log log1p tanh logistic sin cos tan erf erfc erf_inv sqrt rsqrt cbrt pow rem "
    "atan2 nextafter reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax "
    "argmin custom_jvp_call lgamma digamma cumsum".split()
)
_REGIONS = frozenset({"remat2", "checkpoint", "RematTraced"})
_CONSTRUCTS = _REGIONS | {"scan", "while", "cond", "shard_map", "custom_vjp_call", "pmap"}


def is_construct(eqn: Any) -> bool:
    """Whether the derivative of an equation keeps things of its inside that have no name."""
    return primitive_name(eqn) in _CONSTRUCTS or is_closed(eqn)


def is_heavy(eqn: Any) -> bool:
    """Whether XLA keeps an operator apart from what stands next to it, as it does a product."""
    return primitive_name(eqn) not in _LIGHT


def is_fused(eqn: Any) -> bool:
    """Whether XLA makes what an operator returns inside of whatever reads it."""
    return primitive_name(eqn) in _FUSED


def stays(eqn: Any) -> bool:
    """Whether an equation must not be run twice.

    What acts inside is among its own effects, but for what never leaves it: a kernel that writes
    its results.
    """
    return acts(eqn) or _sends(eqn)


def _sends(eqn: Any) -> bool:
    """Whether replicas talk in it, or a tag keeps it, at any depth."""
    inner = (each for jaxpr in inner_programs(eqn) for each in jaxpr.eqns)
    sends = primitive_name(eqn) in COLLECTIVES or tag_of(eqn) == KEPT
    return sends or any(map(_sends, inner))
