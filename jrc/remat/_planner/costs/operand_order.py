"""Which operands of products and convolutions a CPU's compiler copies into the order that it reads.

A library multiplies matrices, or stacks of matrices: batch axes first, then the free axes as one,
then the contracted axes as one; the second operand has these two the other way round. It takes a
single free and a single contracted axis in either order. All else is copied.

>>> import jax, jax.numpy as jnp
>>> def weight_gradient(g, x):  # of x: [batch, length, width]
...     return jnp.einsum("blf,blw->fw", g, x)
>>> g, x = jnp.ones((2, 4, 8)), jnp.ones((2, 4, 3))
>>> (eqn,) = [e for e in jax.make_jaxpr(weight_gradient)(g, x).eqns if "dot" in e.primitive.name]
>>> len(copied_operands(eqn)), len(merged_operands(eqn))
(1, 1)
"""

from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import primitive_name


def copied_operands(eqn: Any) -> dict[int, tuple[int, ...]]:
    """Return which operands of a product or a convolution are copied, and their axes in order."""
    name = primitive_name(eqn)
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        usual = _usual_orders(len(numbers.lhs_spec))
        specs = (numbers.lhs_spec, numbers.rhs_spec)
        return {i: tuple(specs[i]) for i in range(2) if tuple(specs[i]) != usual[i]}
    if name != "dot_general":
        return {}
    return {i: _order(eqn, i) for i in range(2) if _is_copied(eqn, i)}


def merged_operands(eqn: Any) -> list[int]:
    """Return which operands a product reads as they are, several of their axes as one."""
    if primitive_name(eqn) != "dot_general":
        return []
    return [i for i in range(2) if _has_several_axes(eqn, i) and not _is_copied(eqn, i)]


def is_result_copied(eqn: Any) -> bool:
    """Return whether a convolution writes its result in another order, which is then copied."""
    if primitive_name(eqn) != "conv_general_dilated":
        return False
    spec = eqn.params["dimension_numbers"].out_spec
    return tuple(spec) != _usual_orders(len(spec))[0]


def _usual_orders(axes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order of data, [batch, …, channels], and of a kernel, […, inputs, outputs]."""
    return (0, axes - 1, *range(1, axes - 1)), (axes - 1, axes - 2, *range(axes - 2))


def _is_copied(product: Any, i: int) -> bool:
    batched, _, _ = _axes(product, i)
    if _order(product, i) == tuple(range(product.invars[i].aval.ndim)):
        return False
    return _has_several_axes(product, i) or list(batched) != list(range(len(batched)))


def _order(product: Any, i: int) -> tuple[int, ...]:
    """The axes of an operand in the order that the library reads."""
    batched, free, contracted = _axes(product, i)
    return (*batched, *((*contracted, *free) if i else (*free, *contracted)))


def _has_several_axes(product: Any, i: int) -> bool:
    _, free, contracted = _axes(product, i)
    return len(free) > 1 or len(contracted) > 1


def _axes(product: Any, i: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The batch axes of an operand, its free axes and its contracted ones."""
    contracted, batched = (each[i] for each in product.params["dimension_numbers"])
    axes = range(product.invars[i].aval.ndim)
    return batched, [a for a in axes if a not in contracted and a not in batched], contracted
