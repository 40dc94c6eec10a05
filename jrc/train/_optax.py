"""What optax transforms take besides gradients: extra arguments, and structures of parameters.

`optax.contrib.reduce_on_plateau`, `optax.polyak_sgd` and `optax.lbfgs` take `value=`, `grad=` and
`value_fn=`, `optax.contrib.sophia` takes `obj_fn=`, and `optax.contrib.sam` may take `grad_fn=`.
`optax.lookahead` keeps two sets of parameters, of which one is differentiated.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import optax

from jrc._tree import tree_difference
from jrc._typing import PyTree, Scalar, Transform

_WHO = "jrc.make_train_step"
_LINE_SEARCHES = (optax.ScaleByBacktrackingLinesearchState, optax.ScaleByZoomLinesearchState)


def differentiated(params: PyTree) -> PyTree:
    """Return the parameters that a loss function gets: of `optax.LookaheadParams` the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def wrapped(params: PyTree, opt_state: PyTree) -> PyTree:
    """Return parameters in the structure that the transform with this state steps with."""
    if isinstance(params, optax.LookaheadParams) or not _has_lookahead(opt_state):
        return params
    return optax.LookaheadParams.init_synced(params)


def _has_lookahead(opt_state: PyTree) -> bool:
    return _has(opt_state, optax.LookaheadState)


def _has(opt_state: PyTree, kinds: Any) -> bool:
    """Whether a state has a node of some types."""
    is_one = lambda node: isinstance(node, kinds)  # noqa: E731
    return any(map(is_one, jax.tree.leaves(opt_state, is_leaf=is_one)))


def takes_extra_arguments(tx: Transform) -> bool:
    """Whether extra arguments reach a transform; optax drops them before others."""
    # `MultiSteps.gradient_transformation()` says that it takes none, and takes them.
    owner = getattr(tx.update, "__self__", None)
    extended = optax.GradientTransformationExtraArgs | optax.MultiSteps
    return isinstance(tx, extended) or isinstance(owner, optax.MultiSteps)


def of_the_loss(
    grads: PyTree,
    params: PyTree,
    loss_of: Callable[[PyTree], Scalar],
    mean: Callable[[Any], Any],
) -> dict[str, Any]:
    """Return the extra arguments that are the mean gradient, or functions of parameters.

    Args:
        grads: The mean gradient.
        params: The parameters of this step.
        loss_of: The loss over the batch of this replica.
        mean: The mean over the replicas.
    """
    value_fn = value_function(loss_of, mean, params)
    grad_fn = lambda params, *number: jax.grad(value_fn)(params)  # noqa: E731
    return {"grad": grads, "value_fn": value_fn, "obj_fn": value_fn, "grad_fn": grad_fn}


_OFFERED = ("value", "grad", "value_fn", "obj_fn", "grad_fn")


def value_function(
    loss_of: Callable[[PyTree], Scalar], mean: Callable[[Any], Any], current: PyTree
) -> Callable[[PyTree], Scalar]:
    """Return the mean loss over the replicas as a function of parameters, for a line search.

    Its derivatives, forward and backward, are those of the mean too. Parameters that
    `optax.masked` hides are those of this step.

    Args:
        loss_of: The loss over the batch of this replica.
        mean: The mean over the replicas.
        current: The parameters of this step.
    """

    @jax.custom_jvp
    def shared(params: PyTree) -> PyTree:
        return params

    # Parameters are equal on every replica, and so is their tangent. The transpose of a mean is a
    # mean: a cotangent, which differs between the replicas, becomes that of the mean loss.
    @shared.defjvp
    def shared_jvp(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
        return primals[0], mean(tangents[0])

    # A line search of optax raises where an extra argument is none of its own and no argument of
    # this function.
    def value_fn(params: PyTree, obj_fn: Any = None, grad_fn: Any = None) -> Scalar:
        is_hidden = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
        own = differentiated(params)
        whole = jax.tree.map(
            lambda new, old: old if is_hidden(new) else new,
            own,
            differentiated(current),
            is_leaf=is_hidden,
        )
        return mean(loss_of(shared(whole)))

    return value_fn


def update(
    tx: Transform, grads: PyTree, opt_state: PyTree, params: PyTree, extra: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """Call a transform's update with those of some extra arguments that it takes.

    Raises:
        TypeError: If it needs another one.
    """
    # An `optax.MultiSteps` takes extra arguments, though it is no transform of optax's class.
    given: Any = tx
    extended = given if takes_extra_arguments(tx) else optax.with_extra_args_support(given)
    taken = dict(extra)
    while True:
        try:
            return extended.update(grads, opt_state, params, **taken)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            refused = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
            if refused and refused[1] in taken:  # `optax.contrib.sam` takes those that it knows
                del taken[refused[1]]
                continue
            text = _explained(error, tx, opt_state, extra)
            if text is None:
                raise
            raise TypeError(text) from error


def _explained(
    error: Exception, tx: Transform, opt_state: PyTree, extra: dict[str, Any]
) -> str | None:
    """Return what to do about an error of a transform; `None` if extra arguments are no cause."""
    found = re.search(r"missing \d+ required keyword-only arguments?: (.*)$", str(error))
    if found is None:
        searches = "grad" in extra and _has(opt_state, _LINE_SEARCHES)
        return _search_text(error) if searches else None
    missing, names = found[1], re.findall(r"'(\w+)'", found[1])
    if set(names) <= set(extra if takes_extra_arguments(tx) else _OFFERED):
        return (
            f"{_WHO}: tx must hand its extra arguments on to the transform that needs {missing}, "
            "got a wrapper that drops them, as optax.lookahead, optax.contrib.sam and "
            "optax.contrib.split_real_and_imaginary do. Leave one of the two out, or chain the "
            "transform behind the wrapper."
        )
    remedy = "Bind it to the transform, or call the transform in a step of your own."
    if "grad" in names or "value_fn" in names:
        remedy = (
            "A compression gets local gradients, so that there is neither a mean gradient nor a "
            "loss as a function of the parameters: leave one of the two out."
        )
    return (
        f"{_WHO}: tx must need no extra arguments but 'value', and without compression 'grad' and "
        f"'value_fn', got a transform that needs {missing}. {remedy}"
    )


def _search_text(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return (
        f"{_WHO}: tx must give its line search the parameters of the step, as 'grad' and "
        f"'value_fn' have them, got {type(error).__name__}: {first}. Pass "
        "mask_compatible_extra_args=True to optax.masked and optax.partition; inside of "
        "optax.flatten a line search cannot run: leave one of the two out."
    )


def check_same_state(old: PyTree, new: PyTree) -> None:
    """Raise if a transform returns a state of another structure than it was given."""
    if difference := tree_difference(old, new):
        raise TypeError(
            f"{_WHO}: tx must return a state of the structure that it gets, got another one: "
            f"{difference}. Give the train state the state of tx after one update: optax.monitor "
            "and the like begin with an empty one."
        )


def check_structure(params: PyTree, opt_state: PyTree, who: str) -> None:
    """Raise if the parameters lack the structure that the transform steps with."""
    if isinstance(params, optax.LookaheadParams) and not _has_lookahead(opt_state):
        raise ValueError(
            f"{who}: params must be the model's own where tx has no optax.lookahead, got "
            "optax.LookaheadParams. Pass params.slow."
        )
    if wrapped(params, opt_state) is not params:
        raise ValueError(
            f"{who}: state must have optax.LookaheadParams as params for the optax.lookahead in "
            f"tx, got {type(params).__name__}. Build it with jrc.init_state(params, tx, key)."
        )
