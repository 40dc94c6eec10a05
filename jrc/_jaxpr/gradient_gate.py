"""An identity primitive that controls the gradient that flows back through it.

Like a mark it does not count as an operator: where a program is cut does not depend on it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jrc._jaxpr.primitives import primitive_name

gate_p = Primitive("gate")
gate_p.def_impl(lambda x, *_, **__: x)
gate_p.def_abstract_eval(lambda aval, *_, **__: aval)


def gate(x: Any, probe: Any = None, *, stop: bool = False) -> Any:
    """Return `x`; copy its gradient to `probe`, or stop it.

    Args:
        x: A floating array.
        probe: An array like `x` whose values are not read; its gradient is that of the result.
        stop: Whether `x` has no gradient.

    Returns:
        `x`.
    """
    return gate_p.bind(*([x] if probe is None else [x, probe]), stop=stop)


def stops_gradient(eqn: JaxprEqn) -> bool:
    """Return whether no gradient flows back: a gate that stops it, or JAX's `stop_gradient`."""
    if eqn.primitive is gate_p:
        return eqn.params["stop"]
    return primitive_name(eqn) == "stop_gradient"


def _jvp(primals: Any, tangents: Any, *, stop: bool) -> tuple[Any, Any]:
    x, *_ = primals
    flowing = [t for t in tangents[1 if stop else 0 :] if type(t) is not ad.Zero]
    if not flowing:
        return x, ad.Zero(jax.typeof(x))
    return x, flowing[0] if len(flowing) == 1 else flowing[0] + flowing[1]


def _batch(args: Any, dims: Any, *, stop: bool) -> tuple[Any, int]:
    if len(args) == 1:
        return gate_p.bind(*args, stop=stop), dims[0]
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    return gate_p.bind(*map(lambda x, d: _front(x, d, size), args, dims), stop=stop), 0


def _front(x: Any, dim: int | None, size: int) -> Any:
    """Return an array with its batch axis first; one without a batch axis is broadcast."""
    if dim is None:
        return jnp.broadcast_to(x[None], (size, *x.shape))
    return jnp.moveaxis(x, dim, 0)


ad.primitive_jvps[gate_p] = _jvp
batching.primitive_batchers[gate_p] = _batch
mlir.register_lowering(gate_p, lambda _, x, *__, **___: [x])
