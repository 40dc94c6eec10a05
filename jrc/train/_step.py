"""The train step: local gradients, one exchange, one update, on one device or on many."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jrc._errors import listed
from jrc._rng import fold_all
from jrc._tree import is_typed_key
from jrc._typing import Array, PyTree, Scalar
from jrc.dgc import DGCState, dgc_specs, dgc_states, ring_all_reduce_bytes, served
from jrc.train._check import check_batch, check_state
from jrc.train._gradient import gradient, mean_or_sum
from jrc.train._state import TrainState, mesh_or_all

VIAS = ("shard_map", "pmap", "jit")

# Virtual CPU devices that run ahead of one another end in a deadlock of their collectives.
_BLOCK_EVERY = 8


class StepInfo(NamedTuple):
    """What one step did; scalars, the same on every replica.

    Attributes:
        loss: Mean loss over all replicas.
        aux: What the loss function returned besides: floating leaves averaged, counts (integers
            and booleans) added up over parts and replicas.
        grad_norm: Mean over replicas of the L2 norm of the local gradient.
        density: Share of the compressed entries that was sent; 1 without compression.
        bytes_sent: Bytes that each replica sent for gradients.
        skipped: Whether parameters, optimizer and model state were left as they were because a
            gradient was not finite (only with a `DGCState`).
    """

    loss: Scalar
    aux: PyTree
    grad_norm: Scalar
    density: Scalar
    bytes_sent: Scalar
    skipped: Array


@dataclasses.dataclass(eq=False)
class TrainStep:
    """A compiled train step: `state, info = step(state, batch)`.

    Attributes:
        replicas: Number of replicas.
        via: How they run: `"shard_map"`, `"pmap"` or `"jit"`.
    """

    replicas: int
    via: str
    _call: Callable[[TrainState, PyTree], tuple[TrainState, StepInfo]]
    _check: Callable[..., None]
    _blocks: bool
    _calls: int = 0

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
        """Do one step.

        Args:
            state: From `jrc.init_state` or the step before. It is donated unless `donate=False`.
            batch: A pytree of arrays with the examples of all replicas along the leading axis.

        Returns:
            The new state, and what the step did.
        """
        self._check(state, batch, first=self._calls == 0)
        state, info = self._call(state, batch)
        self._calls += 1
        if self._blocks and self._calls % _BLOCK_EVERY == 0:
            jax.block_until_ready(info.loss)
        return state, info

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """The lowered program, for its text, cost and memory (arrays or shapes as arguments)."""
        if self.via == "pmap":
            raise ValueError("TrainStep.lower: pmap has no such view; use via='shard_map'.")
        self._check(state, batch, first=True)
        return self._call.lower(state, batch)  # type: ignore[attr-defined]


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    axis_name: str = "data",
    via: str = "shard_map",
    accumulate: int = 1,
    donate: bool = True,
) -> TrainStep:
    """Join a loss function and an optimizer into `step(state, batch) -> (state, info)`.

    Every replica takes the gradient of its own part of the batch. A `tx` that holds a `DGCState`
    gets these local gradients and exchanges what it sends itself; any other gets their mean, as do
    leaves that `optax.masked` or `optax.multi_transform` keep from the compression. With
    compression, a gradient that is not finite on any replica leaves the whole step out, on all.
    Keys are folded with the step, then with the replica, then with the part of the batch.

    Args:
        loss_fn: `loss_fn(params, batch, key) -> loss` or `(loss, aux)`; with a model state
            `loss_fn(params, model_state, batch, key) -> (loss, (model_state, aux))`. The loss is
            the mean over the given part of the batch. The floating leaves of the model state are
            averaged over the replicas, integers are those of replica 0. For recomputation pass
            `jrc.recompute_segments(loss_fn, [...])`.
        tx: Any optax transform; one with `jrc.scale_by_dgc(axis_name=axis_name)` compresses.
        mesh: The replicas' devices; `None` is one axis over all devices. The same as for
            `jrc.init_state`.
        axis_name: The mesh axis of the replicas.
        via: `"shard_map"`, `"pmap"` or `"jit"` (one device, no axis).
        accumulate: Number of equal parts into which a replica's batch is cut; their gradients are
            averaged before the update.
        donate: Whether the step may reuse the memory of the state that it is given.

    Returns:
        The step.

    Raises:
        ValueError: For an unknown `via`, `accumulate` below 1, a missing axis, more than one
            device with `"jit"`; at the first call for a batch that does not split, a loss that is
            no scalar, or a `DGCState` whose transform knows of no axis.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> def loss_fn(params, batch, key):
        ...     x, y = batch
        ...     return jnp.mean((x @ params["w"] - y) ** 2)
        >>> tx = optax.sgd(0.1)
        >>> state = jrc.init_state({"w": jnp.zeros(3)}, tx, jax.random.key(0))
        >>> step = jrc.make_train_step(loss_fn, tx)
        >>> state, info = step(state, (jnp.ones((8, 3)), jnp.ones(8)))
        >>> float(info.loss), int(state.step)
        (1.0, 1)
    """
    who = "jrc.make_train_step"
    if via not in VIAS:
        raise ValueError(f"{who}: via is one of {listed(VIAS)}; got {via!r}.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"{who}: accumulate is a whole number from 1; got {accumulate!r}.")
    if via == "jit":
        mesh = Mesh(jax.devices()[:1], (axis_name,)) if mesh is None else mesh
    mesh = mesh_or_all(mesh, axis_name, who)
    replicas = mesh.shape[axis_name]
    if via == "jit" and mesh.size > 1:
        raise ValueError(f"{who}: via='jit' is for one device; the mesh has {mesh.size}.")
    if via == "pmap" and mesh.size > replicas:
        raise ValueError(
            f"{who}: via='pmap' is for a mesh of one axis; it has {listed(mesh.axis_names)}. "
            "Use via='shard_map'."
        )

    axis = None if via == "jit" else axis_name
    body = functools.partial(_replica_step, loss_fn, tx, axis, replicas, accumulate)
    call = _RUNNERS[via](body, mesh, axis_name, donate)

    def check(state: TrainState, batch: PyTree, first: bool) -> None:
        words = f"replicas * accumulate = {replicas} * {accumulate}"
        check_batch(batch, replicas * accumulate, words)
        if first:
            check_state(tx, state, axis, replicas)

    devices = mesh.local_mesh.devices.flat
    blocks = mesh.size > 1 and len(devices) > 1 and devices[0].platform == "cpu"
    return TrainStep(replicas, via, call, check, blocks)


def _replica_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    axis: str | None,
    replicas: int,
    accumulate: int,
    state: TrainState,
    batch: PyTree,
) -> tuple[TrainState, StepInfo]:
    """What one replica does in one step."""
    over = _Replicas(axis)
    key = fold_all(state.key, state.step, over.rank)
    local = gradient(loss_fn, state.params, state.model_state, batch, key, accumulate)
    compression = dgc_states(state.opt_state)
    own = served(local.grads, compression)
    grads = jax.tree.map(lambda g, own: g if own else over.mean(g), local.grads, own)
    skipped = jnp.zeros((), bool)
    if compression:
        # Known before anything changes, so that all of a chain, and not the compression alone,
        # leaves the step out; and on all replicas together, so that no transform branches on it.
        skipped = over.total(_has_bad(local.grads).astype(jnp.int32)) > 0
        grads = jax.tree.map(lambda g: jnp.where(skipped, jnp.nan, g).astype(g.dtype), grads)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    model_state = jax.tree.map(over.shared, local.model_state)
    if compression:
        # The compression's own state says that the step was skipped; all else stays as it was.
        params, opt_state, model_state = jax.tree.map(
            lambda old, new: new if isinstance(new, DGCState) else jnp.where(skipped, old, new),
            (state.params, state.opt_state, state.model_state),
            (params, opt_state, model_state),
            is_leaf=lambda node: isinstance(node, DGCState),
        )
    density, sent = _books(compression, opt_state, skipped)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(own), strict=True)
    dense = sum(g.size for g, alone in pairs if not alone)
    sent += ring_all_reduce_bytes(dense, replicas)
    loss, norm = over.mean((local.loss, _norm(local.grads)))
    aux = jax.tree.map(lambda x: mean_or_sum(jnp.asarray(x), over.mean, over.total), local.aux)
    info = StepInfo(loss, aux, norm, density, sent, skipped)
    return TrainState(state.step + 1, params, model_state, opt_state, state.key), info


class _Replicas:
    """The replica axis inside a step; without one, a single replica."""

    def __init__(self, axis: str | None) -> None:
        self.axis = axis
        self.rank = jnp.int32(0) if axis is None else jax.lax.axis_index(axis)

    def mean(self, x: Any) -> Any:
        return x if self.axis is None else jax.lax.pmean(x, self.axis)

    def total(self, x: Any) -> Any:
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def shared(self, x: Array) -> Array:
        """One value for all: the mean of floats, replica 0's of integers and Booleans."""
        if is_typed_key(x):
            return x
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return self.mean(x)
        first = jnp.where(self.rank == 0, x, jnp.zeros_like(x))
        return self.total(first.astype(jnp.int32) if x.dtype == bool else first).astype(x.dtype)


def _has_bad(grads: PyTree) -> Array:
    return jnp.stack([~jnp.isfinite(g).all() for g in jax.tree.leaves(grads)] or [False]).any()


def _norm(grads: PyTree) -> Array:
    """L2 norm of a gradient, in float32: squares of half-precision entries overflow."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))


def _books(old: list[DGCState], opt_state: PyTree, skipped: Array) -> tuple[jax.Array, jax.Array]:
    """Density and bytes of all compressing transforms together; nothing for one that waited."""
    density, sent, entries = jnp.zeros(()), jnp.zeros(()), 0
    for before, after in zip(old, dgc_states(opt_state), strict=True):
        size = sum(v.size for v in jax.tree.leaves(after.v))
        acted = skipped | (after.step != before.step)
        sent += jnp.where(acted, after.bytes_sent, 0.0)
        density += size * after.density
        entries += size
    return (density / entries if entries else jnp.ones(())), sent


def _via_jit(body: Callable[..., Any], mesh: Mesh, axis_name: str, donate: bool) -> Any:
    del mesh, axis_name
    return jax.jit(body, donate_argnums=(0,) if donate else ())


def _via_shard_map(body: Callable[..., Any], mesh: Mesh, axis_name: str, donate: bool) -> Any:
    def call(state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
        specs = dgc_specs(state, axis_name)
        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(axis_name)),
            out_specs=(specs, PartitionSpec()),
            # Replication types would sum gradients before they are compressed, and refuse loss
            # functions that scan over a constant carry.
            check_vma=False,
        )(state, batch)

    return jax.jit(call, donate_argnums=(0,) if donate else ())


def _via_pmap(body: Callable[..., Any], mesh: Mesh, axis_name: str, donate: bool) -> Any:
    del donate  # the leading axis that pmap wants is made and taken away by a copy
    replicas, devices = mesh.shape[axis_name], list(mesh.devices.flat)

    @functools.cache
    def mapped(treedef: Any, own: tuple[bool, ...]) -> Any:
        axes = [0 if alone else None for alone in own]

        def flat(leaves: list[Array], batch: PyTree) -> tuple[list[Array], StepInfo]:
            state, info = body(treedef.unflatten(leaves), batch)
            return jax.tree.leaves(state), info

        return jax.pmap(flat, axis_name, in_axes=(axes, 0), out_axes=(axes, None), devices=devices)

    def spread(x: Array) -> Array:
        return jnp.reshape(x, (replicas, -1, *jnp.shape(x)[1:]))

    def call(state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
        leaves, treedef = jax.tree.flatten(state)
        specs = jax.tree.leaves(dgc_specs(state, axis_name))
        own = tuple(spec != PartitionSpec() for spec in specs)
        stacked = [spread(x) if alone else x for x, alone in zip(leaves, own, strict=True)]
        new, info = mapped(treedef, own)(stacked, jax.tree.map(spread, batch))
        joined = [
            x.reshape(-1, *x.shape[2:]) if alone else x for x, alone in zip(new, own, strict=True)
        ]
        return treedef.unflatten(joined), info

    return call


_RUNNERS = {"jit": _via_jit, "shard_map": _via_shard_map, "pmap": _via_pmap}
