"""The base of Paddle's optimizers: gradients by name, and an optax transform."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrc._errors import public
from jrc._extra_arguments import extended, taken
from jrc._tree import named_leaves
from jrc._typing import Array, PyTree
from jrc.compat.paddle._callbacks import Callback
from jrc.compat.paddle._check_loss import check_function
from jrc.compat.paddle._gradients import Arguments, Found, ParamGrad, gradients
from jrc.compat.paddle._names import Name
from jrc.compat.paddle._update import check_given, clipped, gradient_tree, update
from jrc.dgc._internal import as_local


def method[F: Callable[..., Any]](fn: F) -> F:
    """Give errors of a method the name of the class that was called, as `public` does."""

    @functools.wraps(fn)
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        with public(f"jrc.compat.{type(self).__name__}.{fn.__name__}"):
            return fn(self, *args, **kwargs)

    return cast(F, call)


class Optimizer:
    """The methods of Paddle's optimizers; every array is an argument or a result.

    An optax transform as well: `init` and `update` are those of `tx`.
    """

    def __init__(
        self,
        tx: Any,
        parameter_list: Sequence[Name] | None = None,
        axis_name: str | None = None,
    ) -> None:
        self.tx = tx
        self.parameter_list = parameter_list
        self.axis_name = axis_name
        self._warned: set[str] = set()

    def init(self, params: PyTree) -> PyTree:
        """Return the state before the first step, that of the optax transform.

        Args:
            params: Parameters, any pytree of arrays.

        Returns:
            The state, a pytree of arrays.
        """
        return self.tx.init(params)

    @method
    def update(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the update of the optax transform, for gradients of all parameters.

        Args:
            updates: Gradients like the parameters.
            state: From `init` or the step before.
            params: The parameters.
            **extra_args: Other arguments of the transform, such as `value`.

        Returns:
            The updates to add to the parameters, and the new state.

        Raises:
            TypeError: If the state is `None`.
        """
        check_given(state)
        return extended(self.tx).update(updates, state, params, **extra_args)

    @method
    def backward(
        self,
        loss_fn: Callable[..., Any],
        params: PyTree,
        *args: Any,
        startup_program: None = None,
        parameter_list: Sequence[Name] | None = None,
        no_grad_set: Collection[Name] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        checkpoints: Sequence[str] | None = None,
        has_aux: bool = False,
    ) -> Any:
        """Return the gradients of a loss, as pairs of name and gradient: `append_backward`.

        Args:
            loss_fn: `loss_fn(params, *args)`, which returns one real number.
            params: Parameters, any pytree.
            *args: The other arguments of the loss function.
            startup_program: Paddle's; there are no programs here, so that it is `None`.
            parameter_list: Names of the values to differentiate with respect to, in the order of
                the pairs.
            no_grad_set: Names without a gradient.
            callbacks: Functions that are called for every forward equation with a gradient.
            checkpoints: Boundaries, instead of those that were set.
            has_aux: Whether the loss function returns `(loss, aux)`. To get the loss as well,
                return it in `aux`.

        Returns:
            A list of `ParamGrad`s, each a pair `(name, grad)`; with `has_aux`, the list and `aux`.

        Raises:
            TypeError: As `append_backward`.
            ValueError: As `append_backward`; if no boundaries are set where they must be; if
                there is a `startup_program`.
        """
        options = Arguments(parameter_list, no_grad_set, callbacks, checkpoints, has_aux)
        found = self._gradients(loss_fn, params, args, options, startup_program)
        return (found.pairs, found.value[1]) if has_aux else found.pairs

    @method
    def apply_gradients(
        self,
        params: PyTree,
        opt_state: PyTree,
        params_grads: Sequence[tuple[str, Array]],
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        """Apply gradients that are already computed.

        Args:
            params: Parameters, any pytree.
            opt_state: From `init` or the step before.
            params_grads: Pairs of a parameter's name and its gradient, in any order.
            **extra_args: Other arguments of the transform, such as `value`, the loss. `grad` is
                passed if the transform takes it.

        Returns:
            The new parameters and the new state. Parameters without a pair, and their part of the
            state, are bit for bit unchanged: no decay and no momentum reaches them. State that
            belongs to no single parameter, such as a count of steps, is updated.

        Raises:
            TypeError: If the state is `None` or another transform's, or `params_grads` is not a
                list of pairs of a name and an array.
            ValueError: If a name is unknown or occurs twice, or a shape differs.
        """
        return self._apply(params, opt_state, params_grads, None, extra_args)

    @method
    def apply_optimize(
        self,
        loss: Any,
        startup_program: None,
        params_grads: Sequence[tuple[str, Array]],
        params: PyTree,
        opt_state: PyTree,
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        """Apply gradients as `apply_gradients`, with Paddle's arguments before the arrays.

        Args:
            loss: Paddle's; it is not used.
            startup_program: Paddle's; there are no programs here, so that it is `None`.
            params_grads: Pairs of a parameter's name and its gradient.
            params: Parameters, any pytree.
            opt_state: From `init` or the step before.
            **extra_args: As for `apply_gradients`.

        Returns:
            The new parameters and the new state.

        Raises:
            TypeError: As `apply_gradients`.
            ValueError: As `apply_gradients`, or if there is a `startup_program`.
        """
        del loss
        _check_no_program(startup_program)
        return self._apply(params, opt_state, params_grads, None, extra_args)

    @method
    def minimize(
        self,
        loss_fn: Callable[..., Any],
        params: PyTree,
        opt_state: PyTree,
        *args: Any,
        startup_program: None = None,
        parameter_list: Sequence[Name] | None = None,
        no_grad_set: Collection[Name] | None = None,
        grad_clip: optax.GradientTransformation | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        has_aux: bool = False,
    ) -> tuple[PyTree, PyTree, Any, list[ParamGrad]]:
        """Do one step: the gradients of a loss, and their update.

        The transform is also given those that it takes of `value`, the loss, `grad`, the gradients
        before clipping, and `value_fn`, the loss as a function of the parameters.

        Args:
            loss_fn: `loss_fn(params, *args)`, which returns one real number.
            params: Parameters, any pytree.
            opt_state: From `init` or the step before.
            *args: The other arguments of the loss function.
            startup_program: Paddle's; there are no programs here, so that it is `None`.
            parameter_list: Names of the parameters to update; the others, and their state, are
                unchanged. A mark gives its pair, and updates nothing.
            no_grad_set: Names without a gradient.
            grad_clip: An optax transform without state, applied to the gradients.
            callbacks: Functions that are called for every forward equation with a gradient.
            has_aux: Whether the loss function returns `(loss, aux)`.

        Returns:
            The new parameters, the new state, the result of the loss function, and the pairs
            `(name, grad)` before clipping.

        Raises:
            TypeError: As `backward` and `apply_gradients`, or if `grad_clip` is not a transform
                or has state.
            ValueError: As `backward`.
        """
        options = Arguments(parameter_list, no_grad_set, callbacks, None, has_aux)
        found = self._gradients(loss_fn, params, args, options, startup_program)
        named = {name for name, _ in named_leaves(params)}
        of_params = [pair for pair in found.pairs if pair.name in named]
        extra = {
            "value": jnp.reshape(found.value[0] if has_aux else found.value, ()),
            "value_fn": lambda params: found.value_of(dict(named_leaves(params))),
        }
        extra = taken(self.tx, extra)
        params, opt_state = self._apply(params, opt_state, of_params, grad_clip, extra)
        return params, opt_state, found.value, found.pairs

    def _boundaries(self) -> Sequence[str] | None:
        """Return the boundaries of the recomputed segments; `None` recomputes nothing."""
        return None

    def _gradients(
        self,
        loss_fn: Callable[..., Any],
        params: PyTree,
        args: tuple[Any, ...],
        options: Arguments,
        startup_program: Any,
    ) -> Found:
        check_function(loss_fn)
        _check_no_program(startup_program)
        options = options._replace(warned=self._warned)
        if options.parameter_list is None:
            options = options._replace(parameter_list=self.parameter_list)
        if options.checkpoints is None:
            options = options._replace(checkpoints=self._boundaries())
        params = jax.tree.map(functools.partial(_local, axis=self.axis_name), params)
        return gradients(loss_fn, params, args, options)

    def _apply(
        self,
        params: PyTree,
        opt_state: PyTree,
        params_grads: Sequence[tuple[str, Array]],
        grad_clip: Any,
        extra_args: dict[str, Any],
    ) -> tuple[PyTree, PyTree]:
        check_given(opt_state)
        grads = gradient_tree(params, params_grads)
        extra_args = taken(self.tx, {"grad": grads}) | extra_args
        grads = clipped(grad_clip, grads, params)
        return update(self.tx, params, opt_state, grads, extra_args)


def _local(leaf: Any, axis: str | None) -> Any:
    """Return a parameter typed as local to its replica, whose gradient JAX does not sum."""
    if axis is None or not isinstance(leaf, jax.Array | np.ndarray | float | complex):
        return leaf
    floating = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    return as_local(jnp.asarray(leaf), axis) if floating else leaf


def _check_no_program(startup_program: Any) -> None:
    if startup_program is not None:
        raise ValueError(
            "startup_program must be None, because there are no programs here, got "
            f"{type(startup_program).__name__}. Initialize with opt.init(params)."
        )
