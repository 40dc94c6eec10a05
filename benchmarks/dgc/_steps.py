"""The parameters to compress, as shapes, and whole optimizer steps over replicas."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jrc
from jrc.models import gpt, resnet

AXIS = "data"
RATE, MOMENTUM, SPARSITY = 1e-3, 0.9, 0.999
RAMP = {"sparsity": (0.75, 0.9375, 0.984375, 0.996, 0.999), "rampup_step": 100}
FIXED = {"sparsity": SPARSITY}


def residual(toy: bool) -> Any:
    """Return the shapes of a ResNet-50's parameters."""
    config = resnet.Config(depth=14, classes=10, width=16) if toy else resnet.Config(depth=50)
    return jax.eval_shape(functools.partial(resnet.init, config=config), jax.random.key(0))[0]


def gpt2(toy: bool) -> Any:
    """Return those of GPT-2 124M, whose output layer shares the token embedding."""
    sizes = {"layers": 12, "heads": 12, "width": 768, "length": 1024}
    toys = {"layers": 1, "heads": 2, "width": 64, "length": 32}
    config = gpt.Config(vocabulary=50257, **sizes) if not toy else gpt.Config(**toys)
    params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
    del params["head"]
    return params


def size_of(params: Any) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def one_leaf(params: Any) -> Any:
    """Return one leaf with as many entries."""
    return jax.ShapeDtypeStruct((size_of(params),), jnp.float32)


def optimizer(**options: Any) -> optax.GradientTransformation:
    """Return DGC with momentum at 99.9 %, unless `options` differ."""
    return jrc.dgc_momentum(RATE, MOMENTUM, 0, **{**FIXED, **options})


def in_place(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Return `(gradients, state, params) -> (params, state)`, which writes only what was sent."""
    return functools.partial(jrc.dgc.apply_gradients, tx)


def abstract_mesh(replicas: int) -> AbstractMesh:
    """Return a mesh without devices, to trace and lower for."""
    return AbstractMesh((replicas,), (AXIS,), axis_types=(AxisType.Auto,))


def over_mesh(
    advance: Callable[..., Any], tx: Any, like: Any, mesh: Mesh | AbstractMesh | None
) -> tuple[Callable[..., Any], tuple[Any, Any, Any]]:
    """Return a step over all replicas of a mesh, to be traced.

    Args:
        advance: `(gradients, state, params) -> (params, state)` of one replica.
        tx: The optimizer, for its state.
        like: The parameters' shapes.
        mesh: A mesh with the axis `AXIS`; None is one replica without an axis.

    Returns:
        The jitted step and the shapes of its arguments; state and parameters are donated.
    """
    state = jax.eval_shape(tx.init, like)
    if mesh is None:
        return jax.jit(advance, donate_argnums=(1, 2)), (like, state, like)
    replicas, specs = mesh.shape[AXIS], jrc.dgc_specs(state, AXIS)

    def one(gradients: Any, state: Any, params: Any) -> Any:
        # Results in the order of the donated arguments: XLA copies buffers that change places.
        return advance(jax.tree.map(lambda x: x[0], gradients), state, params)[::-1]

    def widened(x: Any, spec: Any) -> Any:
        shape = (replicas, *x.shape[1:]) if spec == P(AXIS) else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype)

    gradients = jax.tree.map(lambda x: jax.ShapeDtypeStruct((replicas, *x.shape), x.dtype), like)
    over = jax.shard_map(one, mesh=mesh, in_specs=(P(AXIS), specs, P()), out_specs=(specs, P()))
    args = gradients, jax.tree.map(widened, state, specs), like
    return jax.jit(over, donate_argnums=(1, 2)), args
