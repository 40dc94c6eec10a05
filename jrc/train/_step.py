"""The train step: local gradients, one exchange, one update, on one device or on many."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from jrc._errors import listed
from jrc._multihost import all_or_none
from jrc._typing import PyTree
from jrc._validate import check_flag
from jrc.dgc import AxisName
from jrc.remat import Memory, Plan, checked_budget, memory_needed
from jrc.train._budget import Budgeted
from jrc.train._check import (
    check_batch,
    check_batch_of_processes,
    check_devices,
    check_form,
    check_state,
)
from jrc.train._op_tags import with_op_tags
from jrc.train._replica import StepInfo, replica_step
from jrc.train._state import TrainState, check_transform, mesh_or_all, names_of
from jrc.train._runners import RUNNERS

# Virtual CPU devices that run ahead of one another end in a deadlock of their collectives.
_BLOCK_EVERY = 8


_hidden = functools.partial(dataclasses.field, repr=False)


@dataclasses.dataclass(eq=False)
class TrainStep:
    """A compiled train step: `state, info = step(state, batch)`.

    Attributes:
        replicas: Number of replicas.
        via: How they run: `"shard_map"`, `"pmap"` or `"jit"`.
    """

    replicas: int
    via: str
    _call: Callable[[TrainState, PyTree], tuple[TrainState, StepInfo]] = _hidden()
    _check: Callable[..., None] = _hidden()
    _blocks: bool = _hidden()
    _plan: Plan | None = _hidden(default=None)
    _calls: int = _hidden(default=0)

    @property
    def plan(self) -> Plan | None:
        """The plan of recomputation; with a budget it is made at the first call."""
        return self._call.plan if isinstance(self._call, Budgeted) else self._plan

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
        """Do one step.

        Args:
            state: From `jrc.init_state` or the step before. It is donated unless `donate=False`.
            batch: A pytree of arrays with the examples of all replicas along the leading axis: in
                a run of several processes joined by `jax.make_array_from_process_local_data`, or
                the same NumPy arrays on each.

        Returns:
            The new state, and what the step did.
        """
        with _outside_of_meshes():
            self._check(state, batch, first=self._calls == 0, runs=True)
            state, info = self._call(state, batch)
        self._calls += 1
        if self._blocks and self._calls % _BLOCK_EVERY == 0:
            jax.block_until_ready(info.loss)
        return state, info

    def memory(self, state: TrainState, batch: PyTree) -> Memory:
        """What the compiled step needs: it is compiled to be looked at, nothing is run.

        Args:
            state: From `jrc.init_state`, or shapes with shardings of it; it is not donated.
            batch: As for a call; shapes will do.

        Returns:
            Bytes on one device: `arguments`, `outputs`, `temporaries`, `aliased`, and the `peak` of
            them all together.

        Raises:
            ValueError: For `via="pmap"`, which makes several programs.

        Source: XLA's figures for the compiled program.
        """
        return memory_needed(self._lowered(state, batch, "memory"))

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """The lowered program, for its text and cost (arrays or shapes as arguments)."""
        return self._lowered(state, batch, "lower")

    def _lowered(self, state: TrainState, batch: PyTree, called: str) -> jax.stages.Lowered:
        if self.via == "pmap":
            raise ValueError(
                f"jrc.TrainStep.{called}: only one program can be shown; got via='pmap', which "
                "makes several. Use via='shard_map'."
            )
        with _outside_of_meshes():
            self._check(state, batch, first=True, runs=False)
            return self._call.lower(state, batch)  # type: ignore[attr-defined]


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName = "data",
    via: str = "shard_map",
    plan: Plan | None = None,
    memory_budget: int | str | float | None = None,
    accumulate: int = 1,
    donate: bool = True,
) -> TrainStep:
    """Join a loss function and an optimizer into `step(state, batch) -> (state, info)`.

    Every replica takes the gradient of its own part of the batch. A `tx` that holds a `DGCState`
    gets these local gradients and exchanges what it sends itself; any other gets their mean, as do
    leaves that `optax.masked` or `optax.multi_transform` keep from the compression. With
    compression, a gradient that is not finite on any replica leaves the whole step out, on all.
    Keys are folded with the step, then with the replica, then with the part of the batch.

    With several processes (`jax.distributed.initialize`) the mesh has the devices of all, and each
    process makes and calls the step in the same way. It reads its own part of each batch, as large
    as the others', and joins it to theirs:
    `jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(axis_name)), part)`.
    NumPy arrays are the whole batch, the same on every process; that, shapes and dtypes are checked
    at the first call. A budget is met by the plan of process 0.

    Args:
        loss_fn: `loss_fn(params, batch, key) -> loss` or `(loss, aux)`; with a model state
            `loss_fn(params, model_state, batch, key) -> (loss, (model_state, aux))`. The loss is
            the mean over the given part of the batch. The floating leaves of the model state are
            averaged over the replicas, integers are those of replica 0.
        tx: Any optax transform; one with `jrc.scale_by_dgc(axis_name=axis_name)` compresses.
        mesh: The replicas' devices; `None` is one axis over all devices, of all processes too. The
            same as for `jrc.init_state`.
        axis_name: The mesh axis of the replicas, or the pair `(inner, outer)` that the compression
            was given: gradients are averaged over the inner one, inside of a host, and compressed
            between hosts. A batch is split over both, the outer one first.
        via: `"shard_map"`, `"pmap"` (one process) or `"jit"` (one device, no axis).
        plan: What `jrc.plan` made of `loss_fn` and one replica's arguments, for recomputation.
        memory_budget: Bytes on one device (`int`), text (`"16GiB"`) or a fraction, as for
            `jrc.plan`, for the whole step: optimizer state, donation and accumulation included.
            The plan is made at the first call, and anew for arguments of other shapes; it compiles
            the step a few times.
        accumulate: Number of equal parts into which a replica's batch is cut; their gradients are
            averaged before the update.
        donate: Whether the step may reuse the memory of the state that it is given.

    Returns:
        The step.

    Raises:
        TypeError: If `loss_fn` is no function, `tx` no transform, `mesh` no mesh, `plan` no plan,
            or `donate` no Boolean; at the first call, if `loss_fn` does not take what it is given,
            or a state is not of `jrc.init_state`.
        ValueError: For an unknown `via`, `accumulate` below 1, a missing axis, more than one
            device with `"jit"`, more than one process with `"pmap"`; at the first call for a batch
            that does not split or on which processes do not agree, a state on other devices, a
            loss that is no scalar, or a `DGCState` whose transform knows of no axis; if `plan` and
            `memory_budget` are both given, or a budget with `via="pmap"`; if the plan is for
            another program.
        BudgetError: At the first call, if no plan fits.

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
    _check_given(loss_fn, via, accumulate, who)
    check_transform(tx, who)
    check_flag(donate, "donate", who)
    if via == "jit":
        _check_process(mesh, axis_name, who)
        mesh = _one_device(axis_name) if mesh is None else mesh
    mesh = mesh_or_all(mesh, axis_name, who)
    names = names_of(axis_name)
    replicas = math.prod(mesh.shape[name] for name in names)
    if via == "jit" and mesh.size > 1:
        raise ValueError(
            f"{who}: via='jit' is for one device; the mesh has {mesh.size}. Use via='shard_map'."
        )
    if via == "pmap" and mesh.is_multi_process:
        raise ValueError(
            f"{who}: via='pmap' is for one process; the mesh has devices of "
            f"{jax.process_count()}. Use via='shard_map'."
        )
    if via == "pmap" and (mesh.size > replicas or len(names) > 1):
        raise ValueError(
            f"{who}: via='pmap' is for a mesh of one axis; it has {listed(mesh.axis_names)}. "
            "Use via='shard_map'."
        )

    _check_plan(plan, memory_budget, via, who)
    axes = None if via == "jit" else names

    def build(loss_fn: Callable[..., Any]) -> Any:
        body = functools.partial(replica_step, loss_fn, tx, axes, replicas, accumulate)
        return RUNNERS[via](body, mesh, axis_name, donate)

    if memory_budget is not None:
        call = Budgeted(build, loss_fn, memory_budget, who)
    else:
        call = build(with_op_tags(loss_fn) if plan is None else plan.apply(loss_fn))

    def check(state: TrainState, batch: PyTree, first: bool, runs: bool) -> None:
        def here() -> None:
            words = f"replicas * accumulate = {replicas} * {accumulate}"
            check_form(state)
            check_batch(batch, replicas * accumulate, words)
            if first:
                check_state(tx, state, axis_name, mesh)
            if via != "pmap":  # which copies
                check_devices(state, mesh)

        if first and runs and mesh.is_multi_process:
            all_or_none(here, who)
            check_batch_of_processes(batch, names)
        else:
            here()

    devices = mesh.local_devices
    blocks = mesh.size > 1 and len(devices) > 1 and devices[0].platform == "cpu"
    return TrainStep(replicas, via, call, check, blocks, plan)


def _one_device(axis_name: AxisName) -> Mesh:
    names = names_of(axis_name)
    return Mesh(np.asarray(jax.devices()[:1]).reshape([1] * len(names)), names)


def _check_process(mesh: Mesh | None, axis_name: Any, who: str) -> None:
    """Nobody is given one device of many processes without having asked for it."""
    if mesh is None and jax.process_count() > 1:
        raise ValueError(
            f"{who}: via='jit' is for one device; the run has {jax.process_count()} processes. "
            "Use via='shard_map', or give each process a mesh of its own: "
            f"Mesh(jax.local_devices()[:1], ({axis_name!r},))."
        )


def _check_given(loss_fn: Any, via: Any, accumulate: Any, who: str) -> None:
    if not callable(loss_fn):
        raise TypeError(
            f"{who}: loss_fn is a function loss_fn(params, batch, key); got "
            f"{type(loss_fn).__name__}. Pass the function itself."
        )
    if not isinstance(via, str) or via not in RUNNERS:
        raise ValueError(f"{who}: via is one of {listed(RUNNERS)}; got {via!r}.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(
            f"{who}: accumulate is a whole number from 1; got {accumulate!r}. 1 takes the batch "
            "as one part."
        )


def _check_plan(plan: object, budget: object, via: str, who: str) -> None:
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(
            f"{who}: plan is what jrc.plan returns; got {type(plan).__name__}. Read a stored one "
            "with jrc.Plan.from_json(text)."
        )
    if plan is not None and budget is not None:
        raise ValueError(
            f"{who}: give a plan or a memory_budget, not both; got a plan and {budget!r}. Leave "
            "one of them out."
        )
    if budget is not None:
        checked_budget(budget, who)
        if via == "pmap":
            raise ValueError(
                f"{who}: via='pmap' shows no memory to plan with. Use via='shard_map', or pass "
                "plan=jrc.plan(loss_fn, ...)."
            )


def _outside_of_meshes() -> Any:
    """The step brings its own mesh, which `jax.set_mesh` with another axis type would refuse."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
