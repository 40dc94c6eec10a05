"""Which transforms of optax may stand before a compression and around it.

A wrapper may not send in vain, nor make replicas wait for each other (`check_wrappers`). A
transform before the compression gets local gradients, and may not store them (`check_first`). What
comes out is one update for all (`check_mixing`).
"""

import functools
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._errors import listed
from jrc._jaxpr import varying_results
from jrc._layout import Layout
from jrc._specs import restricted
from jrc._tree import named_leaves, nodes_of
from jrc._typing import PyTree, Transform
from jrc.dgc._internal import dgc_states, served
from jrc.train._optax import differentiated, update

_NOT_AROUND: dict[type, tuple[str, str]] = {
    optax.contrib.SAMState: (
        "optax.contrib.sam",
        "which it calls in every step and of which it drops all but one result in a period",
    ),
    optax.contrib.MechanicState: (
        "optax.contrib.mechanize",
        "whose step size it would set by the local gradients of each replica",
    ),
    optax.contrib.GaLoreState: (
        "optax.contrib.galore",
        "whose gradients it would project by a matrix of each replica's own",
    ),
    optax.ConditionallyTransformState: (
        "optax.conditionally_transform",
        "whose local gradients it would apply as they are in the steps that it leaves out",
    ),
}
"""By the type of its state, each wrapper of optax with which replicas would send in vain or differ,
and the reason."""


def check_wrappers(tx: Transform, opt_state: PyTree) -> None:
    """Raise if replicas would send in vain, differ or wait for each other with a wrapper."""
    for node in nodes_of(opt_state, tuple(_NOT_AROUND)):
        if dgc_states(node):
            name, why = _NOT_AROUND[type(node)]
            raise ValueError(
                f"{name} must not be around a compression, {why}, got one. Leave one of the two "
                "out."
            )
    gathered = nodes_of(opt_state, optax.MultiStepsState)
    is_outermost = isinstance(opt_state, optax.MultiStepsState)
    if not is_outermost and any(map(dgc_states, gathered)):
        raise ValueError(
            "optax.MultiSteps must be outermost around a compression, which would be sent "
            "in every mini-step, got one inside of another transform. Write "
            "optax.MultiSteps(optax.chain(...), k)."
        )
    if is_outermost and not _never_skips(tx):
        raise ValueError(
            "optax.MultiSteps must not skip by the gradient of one replica around a "
            "compression, for which the others would wait, got a should_skip_update_fn. Leave "
            "should_skip_update_fn out: a step whose gradient is not finite is skipped by itself."
        )


def _never_skips(tx: Transform) -> bool:
    """Whether this is an `optax.MultiSteps` with the function that it makes by itself."""
    code = lambda steps: getattr(steps._should_skip_update_fn, "__code__", None)  # noqa: E731
    given = getattr(tx.update, "__self__", None)
    without = optax.MultiSteps(optax.identity(), 1)
    return isinstance(given, optax.MultiSteps) and code(given) is code(without)


def check_first(opt_state: PyTree) -> None:
    """Raise if a transform before the compression stores local gradients in its state."""
    chains = jax.tree.leaves(opt_state, is_leaf=_is_chain)
    for chain in map(_parts_of_chain, filter(_is_chain, chains)):
        at = next(i for i, part in enumerate(chain) if dgc_states(part))
        for part in chain[:at]:
            if _has_floats(part):
                raise ValueError(
                    "a transform before the compression must have no state of its own, "
                    f"which would differ between replicas, got {type(part).__name__}. Chain it "
                    "behind jrc.scale_by_dgc."
                )
        for part in chain:
            check_first(part)


def _has_floats(state: PyTree) -> bool:
    """Whether a state has floats besides injected hyperparameters."""
    leaves = jax.tree.leaves(state, is_leaf=_is_injected)
    return any(
        _has_floats(x.inner_state) if _is_injected(x) else jnp.issubdtype(x.dtype, jnp.inexact)
        for x in leaves
    )


def _is_injected(node: Any) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state")


def _is_chain(node: Any) -> bool:
    return any(dgc_states(part) for part in _parts_of_chain(node))


def _typed(mesh: Mesh, shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """Return a shape that is split over the explicit axes of a mesh as a `PartitionSpec` says."""
    split = NamedSharding(mesh, restricted(spec, mesh.abstract_mesh.explicit_axes))
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=split)


def _parts_of_chain(node: Any) -> tuple[Any, ...]:
    """Return the states of an `optax.chain` or an `optax.named_chain` in call order."""
    if isinstance(node, OrderedDict):
        return tuple(node.values())
    return node if type(node) is tuple else ()


def check_mixing(tx: Transform, params: PyTree, opt_state: PyTree, layout: Layout) -> None:
    """Raise if an update differs between replicas, as a norm of local and mean gradients does.

    The update is traced once. What of its state differs between replicas after a step may make the
    updates of later ones differ.
    """
    if nodes_of(opt_state, optax.ApplyIfFiniteState):
        return  # each replica decides by its own gradient, and all of them alike
    names = layout.names
    if layout.params is not None:
        # On explicit axes a type says how an array is split.
        params = jax.tree.map(functools.partial(_typed, layout.mesh), params, layout.params)
        opt_state = jax.eval_shape(tx.init, params)
    grads = differentiated(params)
    local = jax.tree.leaves(served(grads, dgc_states(opt_state)))

    extra: dict[str, Any] = {"value": jnp.float32(0)}
    if layout.params is not None:
        extra["param_specs"] = differentiated(layout.params)

    def updates(grads: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        return update(tx, grads, state, params, extra)

    specs: Any = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    specs |= {"mesh": layout.mesh.abstract_mesh, "axis_names": set(names)}
    run = jax.make_jaxpr(jax.shard_map(updates, **specs), return_shape=True)
    try:
        traced, (new, _) = run(grads, params, opt_state)
    except (TypeError, ValueError, NotImplementedError):
        return  # if it is wrong the step itself raises the error
    everything, nothing = frozenset(names), frozenset[str]()
    given = [everything if own else nothing for own in local]
    given += [nothing] * len(jax.tree.leaves(params))
    state = [nothing] * len(jax.tree.leaves(opt_state))
    while True:
        found = varying_results(traced.jaxpr, [*given, *state])
        count = len(found) - len(state)
        after = [a | b for a, b in zip(state, found[count:], strict=True)]
        if after == state:
            break
        state = after
    pairs = zip(named_leaves(new), found, strict=False)
    differing = [name for (name, _), axes in pairs if axes]
    if differing:
        raise ValueError(
            "tx must give every replica the same update, got different ones of "
            f"{listed(differing[:3])}: something before the compression or around it mixes local "
            "gradients with those that are averaged, as a norm of all leaves does. Leave it out, "
            "or put it inside of the mask: optax.masked(optax.chain(clip, compression), mask)."
        )
