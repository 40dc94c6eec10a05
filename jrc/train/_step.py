"""The train step: local gradients, one exchange, one update, on one device or many."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jrc._errors import listed, named_like, public
from jrc._mesh_axes import AxisName
from jrc._tree import without_static
from jrc._typing import PyTree, Transform
from jrc._validate import whole_number
from jrc.outer_optimizers import OuterOptimizer
from jrc.remat import Memory, Plan, memory_needed, with_op_tags
from jrc.train._arguments import (
    check_options,
    check_order,
    check_outer,
    check_transform,
    check_via,
    layout_of_step,
)
from jrc.train._budget import Budgeted, Planning
from jrc.train._preflight import Preflight
from jrc.train._replica import StepInfo, replica_step
from jrc.train._runners import Programs, outside_of_meshes
from jrc.train._state import TrainState
from jrc.train._synchronisation import Synchronisation

# Virtual CPU devices that run several steps ahead of each other deadlock in their collectives.
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
    _preflight: Preflight = _hidden()
    _programs: Programs = _hidden()
    _budgeted: Budgeted | None = _hidden()
    _plan: Plan | None = _hidden()
    _calls: int = _hidden(default=0)
    _last: Any = _hidden(default=None)
    _number: int = _hidden(default=0)

    @property
    def plan(self) -> Plan | None:
        """Return the plan of recomputation; with a budget it is made at the first call."""
        return self._plan if self._budgeted is None else self._budgeted.plan

    @public("jrc.make_train_step")
    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
        """Do one step.

        Args:
            state: From `jrc.init_state` or the previous step. It is donated unless
                `donate=False`.
            batch: A pytree of arrays with the examples of all replicas along the leading axis. In
                a run of several processes they are joined by
                `jax.make_array_from_process_local_data`, or the same NumPy arrays on each.

        Returns:
            The new state, and the report of the step.
        """
        with outside_of_meshes():
            like = self._programs.with_splits(state, needed=self._budgeted is not None)
            way = self._preflight.check(like, batch)
        program = way.program(functools.partial(self._number_of, state.step))
        with self._programs.mesh():
            programs = self._planned(way, like, batch)
            state, info = programs(way, program, state, batch, like)
        self._calls += 1
        # Kept to know it again; a tracer would leak.
        self._last = None if isinstance(state.step, jax.core.Tracer) else state.step
        self._number += 1
        if self._blocks and self._calls % _BLOCK_EVERY == 0:
            jax.block_until_ready(info.loss)
        return state, info

    def _planned(self, way: Synchronisation, state: TrainState, batch: PyTree) -> Programs:
        """Return the programs of these arguments: with a budget they have a plan of their own."""
        return self._programs if self._budgeted is None else self._budgeted(way, state, batch)

    @property
    def _blocks(self) -> bool:
        """Whether to wait for the devices now and then."""
        mesh = self._programs.layout.mesh
        devices = mesh.local_devices
        return mesh.size > 1 and len(devices) > 1 and devices[0].platform == "cpu"

    def _number_of(self, step: Any) -> int:
        """Return the number of the step that follows, from 1 on.

        It is read from the state once, which waits for the device; after that it is counted as long
        as each call gets the state that the call before returned. A restored state is another one,
        so that a resumed run takes its rounds at the same steps.
        """
        if isinstance(step, jax.core.Tracer):
            raise TypeError(
                "a step with outer= must be called outside of jax.jit, because the number "
                "of the step decides which program runs, got a traced state. Call it in a Python "
                "loop."
            )
        if step is not self._last:
            here = isinstance(step, jax.Array) and not step.is_fully_addressable
            self._number = int(np.asarray(step.addressable_data(0) if here else step))
        return self._number + 1

    @public("jrc.TrainStep.memory")
    def memory(self, state: TrainState, batch: PyTree) -> Memory:
        """Compile the step and return its memory; nothing is run.

        Args:
            state: From `jrc.init_state`, or its shapes with shardings; it is not donated.
            batch: As for a call, or its shapes.

        Returns:
            Bytes on one device: `arguments`, `outputs`, `temporaries`, `aliased`, and `peak`, the
            sum of the first three less the fourth.

        Raises:
            ValueError: For `via="pmap"`, which makes several programs.

        Source: XLA's figures for the compiled program.
        """
        platform = self._programs.layout.mesh.devices.flat[0].platform
        return memory_needed(self._lowered(state, batch), platform)

    @public("jrc.TrainStep.lower")
    def lower(self, state: TrainState, batch: PyTree, **options: Any) -> jax.stages.Lowered:
        """Return the lowered program, for its text and cost (arrays or shapes as arguments).

        Args:
            state: From `jrc.init_state`, or its shapes with shardings.
            batch: As for a call, or its shapes.
            **options: With `outer=`: `closing=False` for the inner step, which exchanges nothing,
                in place of the step that ends a round (of several fragments, that of the last);
                `number=7` for the program of the seventh step, whatever it does.

        Returns:
            The lowered program.
        """
        return self._lowered(state, batch, **options)

    def _lowered(self, state: TrainState, batch: PyTree, **options: Any) -> jax.stages.Lowered:
        if self.via == "pmap":
            raise ValueError(
                "via must be one that makes a single program, got via='pmap'. Use via='shard_map'."
            )
        with public("jrc.make_train_step"), outside_of_meshes():
            state = self._programs.with_splits(state, needed=False)
            way = self._preflight.check(state, batch, runs=False)
        if unknown := sorted(options.keys() - set(way.options)):
            raise TypeError(
                f"options must be {listed(way.options, 'none without outer=')}"
                f", got {listed(unknown)}. Leave it out."
            )
        program = way.lowered(**options)
        with public("jrc.make_train_step"), self._programs.mesh():
            return self._planned(way, state, batch).lower(way, program, state, batch)


@public("jrc.make_train_step")
def make_train_step(
    loss_fn: Callable[..., Any],
    tx: Transform,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName = "data",
    via: str = "shard_map",
    plan: Plan | None = None,
    memory_budget: int | str | float | None = None,
    respect_checkpoints: bool = False,
    offload: bool | float = False,
    compilations: int | None = None,
    minimize: Literal["time", "flops"] = "time",
    accumulate: int = 1,
    donate: bool = True,
    outer: OuterOptimizer | None = None,
) -> TrainStep:
    """Join a loss function and an optimizer into `step(state, batch) -> (state, info)`.

    Parameters may be split: a step keeps the shardings of the state from `jrc.init_state`.

    - `via="shard_map"`: the mesh axes besides `axis_name` split each replica, by automatic or
      explicit sharding. Gradients are averaged, or compressed, between replicas, shard by shard.
    - `via="jit"`: XLA splits everything, over any mesh: FSDP, tensor, expert and sequence
      parallelism, by the shardings of parameters and batch. The loss is the mean over the whole
      batch, and XLA reduces gradients.

    Every replica computes the gradient of its own part of the batch. A `tx` that holds a `DGCState`
    gets these local gradients and exchanges them itself. Any other gets their mean, as do leaves
    that `optax.masked` or `optax.multi_transform` exclude from the compression. With compression, a
    gradient that is not finite on one replica makes all replicas skip the step. Keys are folded
    with the step, then with the replica, then with the part of the batch.

    A transform that takes extra arguments gets `value`, the mean loss; without compression also
    `grad`, the mean gradient, and `value_fn(params)`, the mean loss with this batch and key, which
    line searches such as that of `optax.lbfgs` call (`obj_fn` and `grad_fn` of `optax.contrib` are
    this function and its gradient). With `optax.LookaheadParams` the loss function
    gets the fast ones.

    `jrc.recompute_op` and `jrc.keep_op` in the loss function act as under `jrc.apply_rules`, unless
    a plan or a budget decides what is recomputed.

    With several processes (`jax.distributed.initialize`) the mesh has the devices of all, and each
    process makes and calls the step in the same way. It reads its own part of each batch, all of
    equal size, and joins them:
    `jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(axis_name)), part)`.
    NumPy arrays are the whole batch, equal on every process; values, shapes and dtypes are checked
    at the first call. All processes use the plan of process 0.

    Args:
        loss_fn: `loss_fn(params, batch, key) -> loss` or `(loss, aux)`; with a model state
            `loss_fn(params, model_state, batch, key) -> (loss, (model_state, aux))`. The loss is
            the mean over the given part of the batch. The floating leaves of the model state are
            averaged over the replicas, integers are taken from replica 0.
        tx: Any optax transform; one with `jrc.scale_by_dgc(axis_name=axis_name)` compresses.
        mesh: The devices of the replicas, with automatic or explicit axes; `None` is one axis over
            all devices of all processes (of `via="jit"`, one device). The same as for
            `jrc.init_state`.
        axis_name: The mesh axis of the replicas, or the pair `(inner, outer)` of the compression:
            gradients are averaged over the inner axis, inside a host, and compressed over the outer
            one, between hosts. A batch is split over both, the outer one first.
        via: `"shard_map"`, `"pmap"` (one process) or `"jit"` (no replicas; on several devices
            without compression).
        plan: The result of `jrc.plan` for `loss_fn` and the arguments of one replica.
        memory_budget: Bytes on one device (`int`), text (`"16GiB"`) or a fraction, as for
            `jrc.plan`, for the whole step: optimizer state, donation and accumulation included.
            The first call with arguments of given shapes and dtypes makes a plan, for which it
            compiles the step a few times.
        respect_checkpoints: With a budget, whether regions under a `jax.checkpoint` of your own
            stay as they are, as for `jrc.plan`.
        offload: With a budget, whether values that loops save may be moved to the host's memory, or
            the bytes per second that copies reach, as for `jrc.plan`.
        compilations: With a budget, how many steps a search may compile, 1 to 10, as for
            `jrc.plan`: 6 if not given.
        minimize: With a budget, what its plan has the least of, `"time"` or `"flops"`, as for
            `jrc.plan`.
        accumulate: Number of equal parts into which the batch of a replica is split; their
            gradients are averaged before the update.
        donate: Whether the step may reuse the memory of its argument `state`. With `via="pmap"`
            that of rows is not: they get and lose the leading axis of `jax.pmap` by a copy.
        outer: An outer optimizer, such as `jrc.SparseLoCo()`, the same as for `jrc.init_state`.
            Each replica then takes its `sync_every` steps with `tx` alone, and replicas exchange
            what they changed at the end of each such round. With `via="shard_map"` the mesh axes
            besides `axis_name` split each replica, and a device exchanges its own shards.

    Returns:
        The step.

    Raises:
        TypeError: If `loss_fn` is not a function, `tx` not a transform, `mesh` not a mesh, `plan`
            not a plan, `accumulate` not a whole number, or `donate` not a bool; at the first call,
            if `loss_fn` does not take its arguments, `tx` needs an extra argument that it does not
            get, or the state is not from `jrc.init_state`.
        ValueError: If `via` is unknown, `accumulate` below 1, an axis missing, `plan` and
            `memory_budget` both given, `compilations` not from 1 to 10, or it, `minimize`,
            `offload` or `respect_checkpoints` given without a budget; for more than one process or
            a budget with `"pmap"`; at the first call, for a batch that does not split or differs
            between processes, a state on other devices or another mesh, a loss that is not a
            scalar, a compression over another axis or with `"jit"` on several devices, parameters
            that are split over the axis of replicas, a mesh axis that nothing is split over, or a
            plan for another program.
        BudgetError: At the first call, if no plan fits; on one process it stops all of them.

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
    check_order(loss_fn, tx)
    check_transform(tx)
    check_options(loss_fn, via, donate)
    planning = Planning(memory_budget, respect_checkpoints, offload, compilations, minimize)
    planning.check(plan, via)
    check_outer(outer)
    accumulate = whole_number(
        accumulate, "accumulate", least=1, remedy="1 takes the batch as one part."
    )
    layout = layout_of_step(mesh, axis_name, via)
    check_via(outer, via, layout.mesh)

    def build(loss_fn: Callable[..., Any]) -> Programs:
        body = functools.partial(replica_step, loss_fn, accumulate, via != "jit")
        return Programs(body, layout, via, donate)

    loss_fn = _without_static(loss_fn if plan is None else plan.apply(loss_fn))
    programs = build(with_op_tags(loss_fn) if plan is None else loss_fn)
    budgeted = None if memory_budget is None else Budgeted(build, loss_fn, planning)
    preflight = Preflight(tx, outer, accumulate, programs)
    return TrainStep(layout.parts, via, preflight, programs, budgeted, plan)


def _without_static(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss function of parameters with values that are no arrays."""

    @named_like(loss_fn)
    def call(params: PyTree, *rest: Any) -> Any:
        return loss_fn(without_static(params), *rest)

    return call
