"""The primitive that names an intermediate, and reading names back from equations.

The mark is a primitive of our own because JAX's `checkpoint_name` changes its form with
`jax_remat3` and is looked at by every policy in the program; a mark does nothing by itself.
"""

from typing import Any

from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jrc._jaxpr.gradient_gate import gate_p

mark_p = Primitive("mark")
mark_p.def_impl(lambda x, **_: x)
mark_p.def_abstract_eval(lambda aval, **_: aval)


def bind_mark(x: Any, name: str, leaf: int) -> Any:
    """Name one array; `leaf` counts the arrays of one marked pytree from 0."""
    return mark_p.bind(x, name=name, leaf=leaf)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    # The tangent is not the value that was named, so it goes through unmarked.
    return mark_p.bind(*primals, **params), tangents[0]


def _batch(args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    return mark_p.bind(*args, **params), dims[0]


ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = lambda cotangent, _, **__: [cotangent]
batching.primitive_batchers[mark_p] = _batch
mlir.register_lowering(mark_p, lambda _, x, **__: [x])


def mark_of(eqn: JaxprEqn) -> tuple[str, int] | None:
    """The name and leaf number that this equation gives its output, or `None`.

    Reads our marks and JAX's `checkpoint_name` in both of its forms (`jax_remat3` off and on). A
    gate's name is empty.
    """
    if eqn.primitive is mark_p:
        return eqn.params["name"], eqn.params["leaf"]
    if eqn.primitive is gate_p:
        return "", 0
    if eqn.primitive.name == "name":
        return eqn.params["name"], 0
    inner = eqn.params.get("_prim")
    if inner is not None and type(inner).__name__ == "CheckpointName":
        return inner.params["name"], 0
    return None
