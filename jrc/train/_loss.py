"""The loss of one replica and its gradient: the three forms of a loss function, in parts."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrc._errors import name_of
from jrc._rng import fold_all
from jrc._tree import is_array, is_number, is_typed_key, kind_of, named_leaves, sum_dtype
from jrc._typing import Array, PyTree, RandomKey, Scalar


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


class Objective(NamedTuple):
    """The mean loss over the batch of one replica, a function of parameters and model state.

    Attributes:
        loss_fn: The user's function.
        batch: The batch of this replica.
        key: The random key of this replica in this step.
        accumulate: In how many equal parts the batch is taken.
        strided: Whether a part is every `accumulate`-th example and not a contiguous one. It leaves
            each example on its device where XLA splits the batch.
    """

    loss_fn: Callable[..., Any]
    batch: PyTree
    key: RandomKey
    accumulate: int
    strided: bool = False

    def gradient(self, params: PyTree, model_state: PyTree) -> Gradient:
        """Return the gradient of the mean loss."""
        if self.accumulate == 1:
            return self._gradient(params, model_state, self.batch, self.key)
        # A bfloat16 sum would lose many small parts of a bfloat16 gradient.
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, sum_dtype(x.dtype)), params)
        part = functools.partial(self._gradient, params)
        found = self._mean_of_parts(part, zeros, model_state)
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), found.grads, params)
        return found._replace(grads=grads, aux=jax.tree.map(_over_parts, found.aux))

    def loss(self, params: PyTree, model_state: PyTree) -> Scalar:
        """Return the mean loss, with the parts and keys of `gradient`.

        Of several parts each is recomputed in the backward pass, so that one of them is in memory.
        """
        if self.accumulate == 1:
            return self._result(params, model_state, self.batch, self.key).loss

        @jax.checkpoint
        def part(state: PyTree, batch: PyTree, key: RandomKey) -> Gradient:
            loss, state, _ = self._result(params, state, batch, key)
            return Gradient(loss, None, state, None)

        return self._mean_of_parts(part, None, model_state).loss

    def _mean_of_parts(
        self, part: Callable[..., Gradient], zeros: PyTree, model_state: PyTree
    ) -> Gradient:
        """Return the mean of what `part(model_state, batch, key)` returns; aux is not reduced.

        Gradients are added to zeros, part by part.
        """

        def add_part(
            total: tuple[PyTree, PyTree], given: tuple[Array, PyTree]
        ) -> tuple[tuple[PyTree, PyTree], tuple[Scalar, PyTree]]:
            (sums, state), (index, batch) = total, given
            new = part(state, batch, fold_all(self.key, index))
            sums = jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, new.grads)
            return (sums, new.model_state), (new.loss, new.aux)

        given = jnp.arange(self.accumulate), self._parts()
        (sums, state), (losses, aux) = jax.lax.scan(add_part, (zeros, model_state), given)
        loss = jnp.mean(losses, dtype=sum_dtype(losses.dtype))
        return Gradient(loss, jax.tree.map(lambda x: x / self.accumulate, sums), state, aux)

    def _parts(self) -> PyTree:
        """Return the batch in equal parts, along a new leading axis of each leaf."""

        def split(x: Array) -> Array:
            if self.strided:
                return x.reshape(-1, self.accumulate, *x.shape[1:]).swapaxes(0, 1)
            return x.reshape(self.accumulate, -1, *x.shape[1:])

        return jax.tree.map(split, self.batch)

    def _gradient(
        self, params: PyTree, model_state: PyTree, batch: PyTree, key: RandomKey
    ) -> Gradient:
        def loss_and_rest(params: PyTree) -> tuple[Scalar, tuple[PyTree, PyTree]]:
            loss, *rest = self._result(params, model_state, batch, key)
            return loss, tuple(rest)

        (loss, (model_state, aux)), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(params)
        return Gradient(loss, grads, model_state, aux)

    def _result(
        self, params: PyTree, model_state: PyTree, batch: PyTree, key: RandomKey
    ) -> "Result":
        name = name_of(self.loss_fn)
        # Its nodes are made in this trace: flax nnx refuses to change variables of another.
        model_state = jax.tree.map(lambda x: x, model_state)
        given = (params, batch, key) if model_state is None else (params, model_state, batch, key)
        _check_call(self.loss_fn, given, name)
        return result_of(self.loss_fn(*given), model_state, name)


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
        loss, aux = _pair_of(out, name) if isinstance(out, tuple | list) else (out, None)
        new_state = None
    else:
        loss, rest = _pair_of(out, name, stateful=True)
        new_state, aux = _pair_of(rest, name, stateful=True)
        _check_model_state(model_state, new_state, name)
        new_state = _in_containers_of(model_state, new_state)
    _check_aux(aux, name)
    return Result(_checked_loss(loss, name), new_state, aux)


def _pair_of(out: Any, name: str, stateful: bool = False) -> tuple[Any, Any]:
    """Return the pair that a loss function returned, or raise if it is none."""
    if isinstance(out, tuple) and len(out) == 2:
        return out
    form = "(loss, (model_state, aux))" if stateful else "loss or (loss, aux)"
    is_sequence = isinstance(out, tuple | list)
    kind = f"a {type(out).__name__} of {len(out)}" if is_sequence else kind_of(out)
    raise ValueError(
        f"loss_fn must return {form}, got {kind} from `{name}`. Return that pair as a tuple."
    )


def _check_call(fn: Any, args: tuple[Any, ...], name: str) -> None:
    """Raise unless the loss function takes these arguments, as far as its signature is known."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        given = "params, batch, key" if len(args) == 3 else "params, model_state, batch, key"
        raise TypeError(
            f"loss_fn must take ({given}), got `{name}`, which does not: {error}. There "
            "are four arguments with a model state in jrc.init_state, else three; bind others with "
            "functools.partial."
        ) from error


def _check_model_state(old: PyTree, new: PyTree, name: str) -> None:
    """Raise unless the new model state has the leaves, shapes and dtypes of the old one."""

    def kinds(tree: PyTree) -> list[tuple[str, str]]:
        pairs = named_leaves(tree)
        return [(k, kind_of(x)) for k, x in pairs]

    if kinds(old) != kinds(new):
        differ = [pair for pair in zip(kinds(old), kinds(new), strict=False) if pair[0] != pair[1]]
        change = "one with more or fewer leaves"
        if differ:
            (leaf, kind), (name_now, kind_now) = differ[0]
            now = kind_now if name_now == leaf else f"leaf {name_now!r}"
            change = f"{now} for leaf {leaf!r}, {kind},"
        raise ValueError(
            "the new model state must have the leaves, shapes and dtypes of the old one, "
            f"got {change} from `{name}`. Return it like the argument."
        )


def _in_containers_of(old: PyTree, new: PyTree) -> PyTree:
    """Return a model state in the containers of the old one.

    A module may return a dict for another mapping. Nodes of other kinds stay as they are: they may
    have fields that are no leaves.
    """
    strong = lambda x: x if is_array(x) else jnp.asarray(x, jnp.result_type(x))  # noqa: E731
    new = jax.tree.map(lambda x: strong(x) if is_number(x) else x, new)
    wanted, found = map(jax.tree.structure, (old, new))
    nodes = [found]
    for node in nodes:
        nodes += node.children()
    kinds = [data[0] for node in nodes if (data := node.node_data()) is not None]
    if all(issubclass(kind, Mapping | list | tuple | type(None)) for kind in kinds):
        return wanted.unflatten(jax.tree.leaves(new))
    return new


def _check_aux(aux: PyTree, name: str) -> None:
    """Raise unless aux holds numbers, which are averaged or added over replicas."""
    for leaf_name, leaf in named_leaves(aux):
        if not (is_array(leaf) or isinstance(leaf, int | float)) or is_typed_key(leaf):
            where = leaf_name or "(aux itself)"
            raise ValueError(
                "aux must hold numbers, which are averaged or added over replicas, got "
                f"{kind_of(leaf)} at {where!r} from `{name}`. Take it out of aux."
            )


def _checked_loss(loss: Any, name: str) -> Scalar:
    """Return the loss, or raise unless it is a floating scalar."""
    if (
        not is_number(loss)
        or jnp.shape(loss) != ()
        or not jnp.issubdtype(jnp.result_type(loss), jnp.floating)
    ):
        raise ValueError(
            "loss_fn must return a floating scalar, the mean over the batch, got "
            f"{kind_of(loss)} from `{name}`. Take its mean, and return other values as (loss, aux)."
        )
    return jnp.asarray(loss)
