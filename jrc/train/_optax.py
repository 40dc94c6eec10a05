"""What optax transforms take besides gradients: extra arguments, and structures of parameters.

`optax.contrib.reduce_on_plateau`, `optax.polyak_sgd` and `optax.lbfgs` take `value=`, `grad=` and
`value_fn=`, `optax.contrib.sophia` takes `obj_fn=`, and `optax.contrib.sam` may take `grad_fn=`.
`optax.lookahead` keeps two sets of parameters, of which one is differentiated.
"""

import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import optax

from jrc._errors import listed
from jrc._extra_arguments import Signature, extended, signatures_of, taken
from jrc._tree import nodes_of, tree_difference
from jrc._typing import PyTree, Scalar, Transform

# What optax calls: an error that is raised there comes from its caller.
_LIBRARIES = ("jax", "jaxlib", "numpy", "chex", "functools", "contextlib")
_LINE_SEARCHES = (optax.ScaleByBacktrackingLinesearchState, optax.ScaleByZoomLinesearchState)


def differentiated(params: PyTree) -> PyTree:
    """Return the parameters that a loss function gets: of `optax.LookaheadParams` the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def wrapped(params: PyTree, opt_state: PyTree) -> PyTree:
    """Return parameters in the structure that the transform with this state steps with."""
    if isinstance(params, optax.LookaheadParams) or not nodes_of(opt_state, optax.LookaheadState):
        return params
    return optax.LookaheadParams.init_synced(params)


def of_the_loss(
    grads: PyTree,
    current: PyTree,
    loss_of: Callable[[PyTree], Scalar],
    mean: Callable[[Any], Any],
) -> dict[str, Any]:
    """Return the extra arguments that are the mean gradient, or functions of parameters.

    These are the mean loss over the replicas and its gradient, for a line search. Derivatives of
    the loss, forward and backward, are those of the mean too. Parameters that `optax.masked` hides
    are those of this step.

    Args:
        grads: The mean gradient.
        current: The parameters of this step.
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

    # A line search of optax raises where an extra argument is none of its own and no argument of
    # this function.
    def value_fn(params: PyTree, obj_fn: Any = None, grad_fn: Any = None) -> Scalar:
        is_hidden = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
        whole = jax.tree.map(
            lambda new, old: old if is_hidden(new) else new,
            differentiated(params),
            differentiated(current),
            is_leaf=is_hidden,
        )
        return mean(loss_of(shared(whole)))

    grad_fn = lambda params, *number: jax.grad(value_fn)(params)  # noqa: E731
    return {"grad": grads, "value_fn": value_fn, "obj_fn": value_fn, "grad_fn": grad_fn}


_OFFERED = ("value", "grad", "value_fn", "obj_fn", "grad_fn")


def update(
    tx: Transform, grads: PyTree, opt_state: PyTree, params: PyTree, extra: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """Call a transform's update with those of some extra arguments that it takes.

    Raises:
        TypeError: If it needs another one, or returns a state of another structure.
    """
    tx = extended(tx)
    try:
        updates, new_state = tx.update(grads, opt_state, params, **taken(tx, extra))
    except Exception as error:
        text = _missing(signatures_of(tx), extra)
        if text is None and "grad" in extra and nodes_of(opt_state, _LINE_SEARCHES):
            # A product over a split axis is ambiguous in the search itself; JAX says what to do.
            is_ambiguous = type(error).__name__ == "ShardingTypeError"
            is_of_masks = not is_ambiguous and _is_raised_by_optax(error)
            text = _search_text(error) if is_of_masks else None
        if text is None:
            raise
        raise TypeError(text) from error
    if difference := tree_difference(opt_state, new_state):
        raise TypeError(
            "tx must return a state of the structure that it gets, got another one: "
            f"{difference}. Give the train state the state of tx after one update: optax.monitor "
            "and the like begin with an empty one."
        )
    return updates, new_state


def _missing(reached: Iterable[Signature], extra: Collection[str]) -> str | None:
    """Return what to do about an extra argument that a transform lacks; `None` if none does."""
    for each in reached:
        missing = [x for x in each.needed if x not in extra or not each.is_reached]
        if missing:
            return _text_of(missing, each.is_reached, extra)
    return None


def _text_of(missing: Sequence[str], is_reached: bool, extra: Collection[str]) -> str:
    names = listed(missing) if len(missing) < 3 else f"{listed(missing[:-1])}, and {missing[-1]!r}"
    names = names.replace(", ", " and ") if len(missing) == 2 else names
    if set(missing) <= set(_OFFERED) and not is_reached:
        return (
            f"tx must hand its extra arguments on to the transform that needs {names}, "
            "got a wrapper that drops them, as optax.lookahead, optax.contrib.sam and "
            "optax.contrib.split_real_and_imaginary do. Leave one of the two out, or chain the "
            "transform behind the wrapper."
        )
    remedy = "Bind it to the transform, or call the transform in a step of your own."
    if "grad" in missing or "value_fn" in missing:
        remedy = (
            "A compression gets local gradients, so that there is neither a mean gradient nor a "
            "loss as a function of the parameters: leave one of the two out."
        )
    return (
        "tx must need no extra arguments but 'value', and without compression 'grad' and "
        f"'value_fn', got a transform that needs {names}. {remedy}"
    )


def _is_raised_by_optax(error: Exception) -> bool:
    """Whether an error comes from optax's own code, and not from a function of the user."""
    modules = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    own = [name for name in modules if name.partition(".")[0] not in _LIBRARIES]
    return bool(own) and own[-1].partition(".")[0] == "optax"


def _search_text(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return (
        "tx must give its line search the parameters of the step, as 'grad' and "
        f"'value_fn' have them, got {type(error).__name__}: {first}. Pass "
        "mask_compatible_extra_args=True to optax.masked and optax.partition; inside of "
        "optax.flatten a line search cannot run: leave one of the two out."
    )


def check_structure(params: PyTree, opt_state: PyTree) -> None:
    """Raise if the parameters lack the structure that the transform steps with."""
    has_lookahead = bool(nodes_of(opt_state, optax.LookaheadState))
    if isinstance(params, optax.LookaheadParams) and not has_lookahead:
        raise ValueError(
            "params must be the model's own where tx has no optax.lookahead, got "
            "optax.LookaheadParams. Pass params.slow."
        )
    if wrapped(params, opt_state) is not params:
        raise ValueError(
            "state must have optax.LookaheadParams as params for the optax.lookahead in "
            f"tx, got {type(params).__name__}. Build it with jrc.init_state(params, tx, key)."
        )
