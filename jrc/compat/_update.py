"""Updating the parameters that have a gradient; the others, and their state, stay as they are."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jrc._errors import close_to, listed
from jrc._typing import Array, PyTree
from jrc.compat._check import leaf_names


def gradient_tree(who: str, params: PyTree, params_grads: Sequence[tuple[str, Array]]) -> PyTree:
    """The gradients in the parameters' tree, `optax.MaskedNode()` where there is none."""
    flat, treedef = jax.tree.flatten(params)
    leaves = dict(zip(leaf_names(who, params), flat, strict=True))
    grads: dict[str, Any] = {}
    for name, grad in _checked_pairs(who, params_grads):
        if name not in leaves:
            raise ValueError(
                f"{who}: no parameter is named {name!r}{close_to(name, leaves)}; the parameters "
                f"are {listed(leaves)}. Leave out the pairs of marks."
            )
        if name in grads:
            raise ValueError(f"{who}: two gradients are named {name!r}. Add them, in one pair.")
        if jnp.shape(grad) != jnp.shape(leaves[name]):
            raise ValueError(
                f"{who}: a gradient has its parameter's shape; that of {name!r} is "
                f"{jnp.shape(grad)}, the parameter's {jnp.shape(leaves[name])}. Pair each "
                "gradient with its own name."
            )
        grads[name] = grad
    return treedef.unflatten(grads.get(name, optax.MaskedNode()) for name in leaves)


def check_given(who: str, opt_state: Any) -> None:
    """Refuse no state at all: the seed's optimizers keep theirs, these are given it."""
    if opt_state is None:
        raise TypeError(
            f"{who}: opt_state is the optimizer's state; got None. Start with "
            "opt_state = opt.init(params)."
        )


def _checked_pairs(who: str, params_grads: Any) -> Sequence[tuple[str, Array]]:
    """Pairs of a name and an array, and nothing else."""
    rule = f"{who}: params_grads is a list of pairs of a parameter's name and its gradient"
    if not isinstance(params_grads, list | tuple):
        raise TypeError(
            f"{rule}; got {type(params_grads).__name__}. Pass what backward returns; of a dict, "
            "list(grads.items())."
        )
    for pair in params_grads:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                f"{rule}; got {type(pair).__name__} in it. Write [('layer_0/w', grad)]."
            )
        if pair[1] is None:
            raise TypeError(
                f"{rule}; got None for {pair[0]!r}. Leave out the pairs of parameters without a "
                "gradient."
            )
    return params_grads


def clipped(who: str, grad_clip: Any, grads: PyTree, params: PyTree) -> PyTree:
    """The gradients that exist, through a transform without state."""
    if grad_clip is None:
        return grads
    if not isinstance(grad_clip, optax.GradientTransformation):
        raise TypeError(
            f"{who}: grad_clip is an optax transform; got {grad_clip!r}. Write "
            "grad_clip=optax.clip_by_global_norm(1.0)."
        )
    params = _masked(params, grads)
    if jax.tree.leaves(jax.eval_shape(grad_clip.init, params)):
        raise TypeError(
            f"{who}: grad_clip is a transform without state, because there is no place to keep "
            "it; chain it before the optimizer: optax.chain(grad_clip, tx)."
        )
    return grad_clip.update(grads, grad_clip.init(params), params)[0]


def update(
    who: str,
    tx: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    grads: PyTree,
    extra_args: Mapping[str, Any],
) -> tuple[PyTree, PyTree]:
    """One step of the transform for the parameters that have a gradient.

    The transform sees neither the other parameters nor their state, as under `optax.masked`: a
    norm over all gradients or a decay of all weights does not meet them. What belongs to no
    single parameter, such as a count of steps, goes on.
    """
    tx = optax.with_extra_args_support(tx)
    _check_state(who, tx, params, opt_state)
    if not any(map(_is_masked, jax.tree.leaves(grads, is_leaf=_is_masked))):
        updates, new_state = tx.update(grads, opt_state, params, **extra_args)
        return optax.apply_updates(params, updates), new_state
    masked = _masked(params, grads)
    inner = _state_of(who, tx, masked, opt_state)
    updates, new_state = tx.update(grads, inner, masked, **extra_args)
    new = optax.apply_updates(masked, updates), new_state
    put_back = jax.tree.map(
        lambda new, old: old if _is_masked(new) else new,
        new,
        (params, opt_state),
        is_leaf=_is_masked,
    )
    return cast(tuple[PyTree, PyTree], put_back)


def _check_state(
    who: str, tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree
) -> None:
    """Another transform's state would fail somewhere inside this one, or be taken for its own."""
    expected, got = map(jax.tree.structure, (jax.eval_shape(tx.init, params), opt_state))
    if expected != got:
        raise TypeError(
            f"{who}: opt_state is the state that this optimizer's init makes for these parameters; "
            f"expected {expected}, got {got}. Start with opt_state = opt.init(params)."
        )


def _state_of(
    who: str, tx: optax.GradientTransformation, masked: PyTree, opt_state: PyTree
) -> PyTree:
    """The state without what it keeps for masked parameters: `init` says where that is."""

    def keep(expected: Any, state: Any) -> Any:
        if _is_masked(expected):
            return expected
        if jnp.shape(state) != jnp.shape(expected):
            raise ValueError(
                f"{who}: a parameter without a gradient keeps its state, which a transform has to "
                f"hold parameter by parameter; this one has an array of shape {jnp.shape(state)} "
                f"for all, which would become {jnp.shape(expected)}. Leave no parameter out."
            )
        return state

    expected = jax.eval_shape(tx.init, masked)
    return jax.tree.map(keep, expected, opt_state, is_leaf=_is_masked)


def _masked(params: PyTree, grads: PyTree) -> PyTree:
    return jax.tree.map(lambda g, p: g if _is_masked(g) else p, grads, params, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
