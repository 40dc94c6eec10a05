"""One replica's gradient: the loss function in its three forms, and accumulation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrc._errors import name_of
from jrc._rng import fold_all
from jrc._tree import named_leaves
from jrc._typing import Array, PyTree, RandomKey, Scalar


class Gradient(NamedTuple):
    """What one replica's batch says.

    Attributes:
        loss: Mean loss, a scalar.
        grads: Gradient of the mean loss, like the parameters.
        model_state: The model state after the batch.
        aux: What else the loss function returned; `None` without.
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
) -> Gradient:
    """The gradient of the mean loss over a batch, `accumulate` equal parts one after another."""
    if accumulate == 1:
        return _of_part(loss_fn, params, model_state, batch, key)
    parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)

    def one_more(
        total: tuple[Any, Any, Any], part: tuple[Array, PyTree]
    ) -> tuple[tuple[Any, Any, Any], PyTree]:
        loss, grads, state = total
        index, batch = part
        new = _of_part(loss_fn, params, state, batch, fold_all(key, index))
        grads = jax.tree.map(jnp.add, grads, new.grads)
        return (loss + new.loss, grads, new.model_state), new.aux

    first = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(lambda: _of_part(loss_fn, params, model_state, first, key))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes.loss, shapes.grads))
    (loss, grads, model_state), aux = jax.lax.scan(
        one_more, (*zeros, model_state), (jnp.arange(accumulate), parts)
    )
    grads = jax.tree.map(lambda g: g / accumulate, grads)
    return Gradient(loss / accumulate, grads, model_state, jax.tree.map(_over_parts, aux))


def check_batch(batch: PyTree, parts: int, words: str) -> None:
    """Every leaf's leading axis must split into equal parts."""
    for name, leaf in named_leaves(batch):
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] % parts or jnp.shape(leaf)[0] == 0:
            raise ValueError(
                f"jrc.make_train_step: the leading axis of every batch leaf is a multiple of "
                f"{words} = {parts}; leaf {name or '(the batch itself)'!r} has shape "
                f"{list(jnp.shape(leaf))}. Drop the rest of the batch, or use fewer parts."
            )


def mean_or_sum(
    leaf: Array, mean: Callable[[Array], Array], total: Callable[[Array], Array]
) -> Any:
    """How `aux` is put together: floating leaves are averaged, counts are added up."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return mean(leaf)
    return total(leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf)


def _over_parts(leaf: Array) -> Array:
    return mean_or_sum(leaf, lambda x: jnp.mean(x, 0), lambda x: jnp.sum(x, 0, x.dtype))


def _of_part(
    loss_fn: Callable[..., Any], params: PyTree, model_state: PyTree, batch: PyTree, key: RandomKey
) -> Gradient:
    def loss_and_rest(params: PyTree) -> tuple[Scalar, tuple[PyTree, PyTree]]:
        if model_state is None:
            out = loss_fn(params, batch, key)
            loss, aux = out if isinstance(out, tuple) else (out, None)
            rest = (None, aux)
        else:
            loss, rest = loss_fn(params, model_state, batch, key)
        return _checked(loss, name_of(loss_fn)), rest

    (loss, (model_state, aux)), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(params)
    return Gradient(loss, grads, model_state, aux)


def _checked(loss: Any, name: str) -> Scalar:
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ValueError(
            f"jrc.make_train_step: the loss is a floating scalar, the mean over the batch; "
            f"`{name}` returned {jnp.result_type(loss)}{list(jnp.shape(loss))}. "
            "Take its mean, and return what else you need as (loss, aux)."
        )
    return loss
