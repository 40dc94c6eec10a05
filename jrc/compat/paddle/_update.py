"""Updates of the parameters with a gradient; the others, and their state, are unchanged."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jrc._errors import close_to, listed
from jrc._extra_arguments import extended
from jrc._tree import tree_difference
from jrc._typing import Array, PyTree, Transform
from jrc.compat.paddle._check_loss import leaf_names


def gradient_tree(params: PyTree, params_grads: Sequence[tuple[str, Array]]) -> PyTree:
    """Return the gradients in the parameters' tree, `optax.MaskedNode()` where there is none."""
    flat, treedef = jax.tree.flatten(params)
    leaves = dict(zip(leaf_names(params), flat, strict=True))
    grads: dict[str, Any] = {}
    for name, grad in _checked_pairs(params_grads):
        if name not in leaves:
            raise ValueError(
                f"params_grads must name parameters, got {name!r}{close_to(name, leaves)}. "
                f"The parameters are {listed(leaves)}; leave out the pairs of marks."
            )
        if name in grads:
            raise ValueError(
                f"params_grads must name each parameter once, got {name!r} twice. Add the "
                "two gradients, in one pair."
            )
        if jnp.shape(grad) != jnp.shape(leaves[name]):
            raise ValueError(
                f"a gradient must have its parameter's shape, {jnp.shape(leaves[name])}, "
                f"got {jnp.shape(grad)} for {name!r}. Pair each gradient with its own name."
            )
        grads[name] = grad
    return treedef.unflatten(grads.get(name, optax.MaskedNode()) for name in leaves)


def check_given(opt_state: Any) -> None:
    """Raise without a state: Paddle's optimizers hold theirs, here it is an argument."""
    if opt_state is None:
        raise TypeError(
            "opt_state must be the optimizer's state, got None. Start with "
            "opt_state = opt.init(params)."
        )


def _checked_pairs(params_grads: Any) -> Sequence[tuple[str, Array]]:
    """Return the pairs, or raise if one is not a name and an array."""
    rule = "params_grads must be a list of pairs of a parameter's name and its gradient"
    if not isinstance(params_grads, list | tuple):
        raise TypeError(
            f"{rule}, got {type(params_grads).__name__}. Pass the result of backward; for a dict, "
            "list(grads.items())."
        )
    for pair in params_grads:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                f"{rule}, got one with {type(pair).__name__}. Write [('layer_0/w', grad)]."
            )
        if pair[1] is None:
            raise TypeError(
                f"{rule}, got None for {pair[0]!r}. Leave out the pairs of parameters without a "
                "gradient."
            )
    return params_grads


def clipped(grad_clip: Any, grads: PyTree, params: PyTree) -> PyTree:
    """Return the gradients after a transform without state."""
    if grad_clip is None:
        return grads
    if not isinstance(grad_clip, optax.GradientTransformation):
        raise TypeError(
            f"grad_clip must be an optax transform, got {grad_clip!r}. Write "
            "grad_clip=optax.clip_by_global_norm(1.0)."
        )
    params = _masked(params, grads)
    if jax.tree.leaves(jax.eval_shape(grad_clip.init, params)):
        raise TypeError(
            "grad_clip must be a transform without state, got one with state. Chain it "
            "before the optimizer: optax.chain(grad_clip, tx)."
        )
    return grad_clip.update(grads, grad_clip.init(params), params)[0]


def update(
    tx: Transform,
    params: PyTree,
    opt_state: PyTree,
    grads: PyTree,
    extra_args: Mapping[str, Any],
) -> tuple[PyTree, PyTree]:
    """Do one step of the transform for the parameters with a gradient.

    As under `optax.masked`, the other parameters and their state are not passed to the transform:
    they are in no norm over all gradients and in no decay of all weights. State that belongs to no
    single parameter, such as a count of steps, is updated.
    """
    tx = extended(tx)
    _check_state(tx, params, opt_state)
    if not any(map(_is_masked, jax.tree.leaves(grads, is_leaf=_is_masked))):
        updates, new_state = tx.update(grads, opt_state, params, **extra_args)
        return optax.apply_updates(params, updates), new_state
    masked = _masked(params, grads)
    inner = _state_of(tx, masked, opt_state)
    updates, new_state = tx.update(grads, inner, masked, **extra_args)
    new = optax.apply_updates(masked, updates), new_state
    put_back = jax.tree.map(
        lambda new, old: old if _is_masked(new) else new,
        new,
        (params, opt_state),
        is_leaf=_is_masked,
    )
    return cast(tuple[PyTree, PyTree], put_back)


def _check_state(tx: Transform, params: PyTree, opt_state: PyTree) -> None:
    """Raise if the state is another transform's."""
    if difference := tree_difference(jax.eval_shape(tx.init, params), opt_state):
        raise TypeError(
            "opt_state must be the state that this optimizer's init makes for these "
            f"parameters, got another: {difference}. Start with opt_state = opt.init(params)."
        )


def _state_of(tx: Transform, masked: PyTree, opt_state: PyTree) -> PyTree:
    """Return the state without the part of masked parameters, found by `init` on masked ones."""

    def keep(expected: Any, state: Any) -> Any:
        if _is_masked(expected):
            return expected
        if jnp.shape(state) != jnp.shape(expected):
            raise ValueError(
                "opt_state must have arrays for single parameters where some have no "
                f"gradient, got one of shape {jnp.shape(state)} for all, which would become "
                f"{jnp.shape(expected)}. Give every parameter a gradient."
            )
        return state

    expected = jax.eval_shape(tx.init, masked)
    return jax.tree.map(keep, expected, opt_state, is_leaf=_is_masked)


def _masked(params: PyTree, grads: PyTree) -> PyTree:
    return jax.tree.map(lambda g, p: g if _is_masked(g) else p, grads, params, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
