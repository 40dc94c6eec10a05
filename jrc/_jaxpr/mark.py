"""The primitive that names an intermediate, and the names of equations.

The mark is a primitive of our own because JAX's `checkpoint_name` changes its form with
`jax_remat3`, and every policy in the program acts on it. A mark has no effect by itself.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jrc._jaxpr.gradient_gate import gate_p

mark_p = Primitive("mark")
mark_p.def_impl(lambda x, **_: x)
mark_p.def_abstract_eval(lambda aval, **_: aval)


def bind_mark(x: Any, name: str, leaf: int) -> Any:
    """Return an array under a name; `leaf` numbers the arrays of one marked pytree from 0."""
    return mark_p.bind(x, name=name, leaf=leaf)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    # The tangent is another value than the named one, so it has no mark.
    return mark_p.bind(*primals, **params), tangents[0]


def _batch(args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    return mark_p.bind(*args, **params), dims[0]


ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = lambda cotangent, _, **__: [cotangent]
batching.primitive_batchers[mark_p] = _batch
mlir.register_lowering(mark_p, lambda _, x, **__: [x])


def mark_of(eqn: JaxprEqn) -> tuple[str, int] | None:
    """Return the name and the leaf number that an equation gives its result, or `None`.

    Our marks count, and JAX's `checkpoint_name` in both of its forms (`jax_remat3` off and on). A
    gate has an empty name.
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


def numbered_marks(eqns: Sequence[JaxprEqn]) -> dict[str, tuple[int, ...]]:
    """Return the positions of each mark's equations; repeated names are `name`, `name#2`, ….

    One mark of a pytree is several equations, whose leaf numbers rise. The marks are in program
    order.
    """
    found: dict[str, list[list[int]]] = {}
    last: dict[str, int] = {}
    for i, eqn in enumerate(eqns):
        name, leaf = mark_of(eqn) or ("", 0)
        if not name:
            continue
        if leaf <= last.get(name, leaf):
            found.setdefault(name, []).append([])
        found[name][-1].append(i)
        last[name] = leaf
    named = {
        name if k == 0 else f"{name}#{k + 1}": tuple(positions)
        for name, calls in found.items()
        for k, positions in enumerate(calls)
    }
    return dict(sorted(named.items(), key=lambda item: item[1]))
