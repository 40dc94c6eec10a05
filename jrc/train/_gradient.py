"""The gradient of one replica: the three forms of a loss function, and accumulation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrc._errors import name_of
from jrc._rng import fold_all
from jrc._tree import sum_dtype
from jrc._typing import Array, PyTree, RandomKey, Scalar
from jrc.train._check import check_aux, check_call, check_model_state, checked_loss, pair_of


class Gradient(NamedTuple):
    """The gradient of one replica's batch.

    Attributes:
        loss: Mean loss, a scalar.
        grads: Gradient of the mean loss, like the parameters.
        model_state: The model state after the batch.
        aux: The other results of the loss function; `None` without.
    """

    loss: Scalar
    grads: PyTree
    model_state: PyTree
    aux: PyTree


def gradient(
    loss_fn: Callable[..., Any],
    params: PyTree,
    model_state: PyTree,
    batch: PyTree,
    key: RandomKey,
    accumulate: int,
    strided: bool = False,
) -> Gradient:
    """Return the gradient of the mean loss over a batch, taken in `accumulate` equal parts.

    Parts are contiguous. Strided ones, every `accumulate`-th example, leave each example on its
    device where XLA splits the batch.
    """
    if accumulate == 1:
        return _of_part(loss_fn, params, model_state, batch, key)
    parts = _parts(batch, accumulate, strided)

    def add_part(
        total: tuple[Any, Any, Any], part: tuple[Array, PyTree]
    ) -> tuple[tuple[Any, Any, Any], PyTree]:
        loss, grads, state = total
        index, batch = part
        new = _of_part(loss_fn, params, state, batch, fold_all(key, index))
        grads = jax.tree.map(lambda g, part: g + part.astype(g.dtype), grads, new.grads)
        return (loss + new.loss, grads, new.model_state), new.aux

    first = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(lambda: _of_part(loss_fn, params, model_state, first, key))
    # A bfloat16 sum would lose many small parts of a bfloat16 gradient.
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype), device=x.sharding),
        (shapes.loss, shapes.grads),
    )
    (loss, grads, model_state), aux = jax.lax.scan(
        add_part, (*zeros, model_state), (jnp.arange(accumulate), parts)
    )
    grads = jax.tree.map(lambda g, x: (g / accumulate).astype(x.dtype), grads, shapes.grads)
    return Gradient(loss / accumulate, grads, model_state, jax.tree.map(_over_parts, aux))


def mean_loss(
    loss_fn: Callable[..., Any],
    params: PyTree,
    model_state: PyTree,
    batch: PyTree,
    key: RandomKey,
    accumulate: int,
    strided: bool = False,
) -> Scalar:
    """Return the mean loss over a batch, with the parts and keys of `gradient`.

    Of several parts each is recomputed in the backward pass, so that one of them is in memory.
    """
    if accumulate == 1:
        return _result_of_part(loss_fn, params, model_state, batch, key).loss
    parts = _parts(batch, accumulate, strided)

    @jax.checkpoint
    def add_part(total: tuple[Any, Any], part: tuple[Array, PyTree]) -> tuple[Any, None]:
        loss, state = total
        index, batch = part
        new = _result_of_part(loss_fn, params, state, batch, fold_all(key, index))
        return (loss + new.loss, new.model_state), None

    first = jax.tree.map(lambda x: x[0], parts)
    shape = jax.eval_shape(lambda: _result_of_part(loss_fn, params, model_state, first, key).loss)
    zero = jnp.zeros((), sum_dtype(shape.dtype))
    (loss, _), _ = jax.lax.scan(add_part, (zero, model_state), (jnp.arange(accumulate), parts))
    return loss / accumulate


def _parts(batch: PyTree, number: int, strided: bool) -> PyTree:
    """Return the batch in equal parts, along a new leading axis of each leaf."""

    def split(x: Array) -> Array:
        if strided:
            return x.reshape(-1, number, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(number, -1, *x.shape[1:])

    return jax.tree.map(split, batch)


def mean_or_sum(
    leaf: Array, mean: Callable[[Array], Array], total: Callable[[Array], Array]
) -> Any:
    """Reduce a leaf of `aux`: floating leaves are averaged, counts are added."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return mean(leaf.astype(sum_dtype(leaf.dtype)))
    # A sum over replicas may not fit in the byte that holds one replica's count.
    return total(leaf.astype(jnp.int32) if leaf.dtype.itemsize < 4 else leaf)


def _over_parts(leaf: Array) -> Array:
    return mean_or_sum(leaf, lambda x: jnp.mean(x, 0), lambda x: jnp.sum(x, 0, x.dtype))


class Result(NamedTuple):
    """The result of a loss function, in one form.

    Attributes:
        loss: The mean loss over the batch, a floating scalar.
        model_state: The new model state; `None` without one.
        aux: Everything else; `None` without.
    """

    loss: Scalar
    model_state: PyTree
    aux: PyTree


def result_of(out: Any, model_state: PyTree, name: str) -> Result:
    """Check what the loss function `name` returned, given this model state, and take it apart."""
    if model_state is None:
        loss, aux = pair_of(out, name) if isinstance(out, tuple | list) else (out, None)
        new_state = None
    else:
        loss, rest = pair_of(out, name, stateful=True)
        new_state, aux = pair_of(rest, name, stateful=True)
        check_model_state(model_state, new_state, name)
    check_aux(aux, name)
    return Result(checked_loss(loss, name), new_state, aux)


def _of_part(
    loss_fn: Callable[..., Any], params: PyTree, model_state: PyTree, batch: PyTree, key: RandomKey
) -> Gradient:
    def loss_and_rest(params: PyTree) -> tuple[Scalar, tuple[PyTree, PyTree]]:
        loss, *rest = _result_of_part(loss_fn, params, model_state, batch, key)
        return loss, tuple(rest)

    (loss, (model_state, aux)), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(params)
    return Gradient(loss, grads, model_state, aux)


def _result_of_part(
    loss_fn: Callable[..., Any], params: PyTree, model_state: PyTree, batch: PyTree, key: RandomKey
) -> Result:
    name = name_of(loss_fn)
    # Its nodes are made in this trace: flax nnx refuses to change variables of another.
    model_state = jax.tree.map(lambda x: x, model_state)
    given = (params, batch, key) if model_state is None else (params, model_state, batch, key)
    check_call(loss_fn, given, name)
    return result_of(loss_fn(*given), model_state, name)
