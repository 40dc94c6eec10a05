"""What optax transforms take besides gradients: extra arguments, and structures of parameters.

`optax.contrib.reduce_on_plateau`, `optax.polyak_sgd` and `optax.lbfgs` take `value=`, `grad=` and
`value_fn=`. `optax.lookahead` keeps two sets of parameters, of which one is differentiated.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import optax

from jrc._typing import PyTree, Scalar, Transform

_WHO = "jrc.make_train_step"


def differentiated(params: PyTree) -> PyTree:
    """Return the parameters that a loss function gets: of `optax.LookaheadParams` the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def wrapped(params: PyTree, opt_state: PyTree) -> PyTree:
    """Return parameters in the structure that the transform with this state steps with."""
    if isinstance(params, optax.LookaheadParams) or not _has_lookahead(opt_state):
        return params
    return optax.LookaheadParams.init_synced(params)


def _has_lookahead(opt_state: PyTree) -> bool:
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_lookahead)
    return any(map(_is_lookahead, nodes))


def _is_lookahead(node: Any) -> bool:
    return isinstance(node, optax.LookaheadState)


def takes_extra_arguments(tx: Transform) -> bool:
    """Whether extra arguments reach a transform; optax drops them before others."""
    # `MultiSteps.gradient_transformation()` says that it takes none, and takes them.
    owner = getattr(tx.update, "__self__", None)
    extended = optax.GradientTransformationExtraArgs | optax.MultiSteps
    return isinstance(tx, extended) or isinstance(owner, optax.MultiSteps)


def value_function(
    loss_of: Callable[[PyTree], Scalar], mean: Callable[[Any], Any]
) -> Callable[[PyTree], Scalar]:
    """Return the mean loss over the replicas as a function of parameters, for a line search.

    Its derivatives, forward and backward, are those of the mean too.

    Args:
        loss_of: The loss over the batch of this replica.
        mean: The mean over the replicas.
    """

    @jax.custom_jvp
    def shared(params: PyTree) -> PyTree:
        return params

    # Parameters are equal on every replica, and so is their tangent. The transpose of a mean is a
    # mean: a cotangent, which differs between the replicas, becomes that of the mean loss.
    @shared.defjvp
    def shared_jvp(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
        return primals[0], mean(tangents[0])

    def value_fn(params: PyTree) -> Scalar:
        return mean(loss_of(shared(differentiated(params))))

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
    try:
        return extended.update(grads, opt_state, params, **extra)
    except TypeError as error:
        refused = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
        if refused and refused[1] in extra:  # `optax.contrib.sam` takes none that it does not know
            fewer = {name: value for name, value in extra.items() if name != refused[1]}
            return update(tx, grads, opt_state, params, fewer)
        missing = re.search(r"missing \d+ required keyword-only arguments?: (.*)$", str(error))
        if not missing:
            raise
        raise TypeError(_missing_text(missing[1])) from error


def _missing_text(missing: str) -> str:
    remedy = "Bind it to the transform, or call the transform in a step of your own."
    if "'grad'" in missing or "'value_fn'" in missing:
        remedy = (
            "A compression gets local gradients, so that there is neither a mean gradient nor a "
            "loss as a function of the parameters: leave one of the two out."
        )
    return (
        f"{_WHO}: tx must need no extra arguments but 'value', and without compression 'grad' and "
        f"'value_fn', got a transform that needs {missing}. {remedy}"
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
