"""The optax transform, and steps that write only the parameter entries that were sent."""

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp
import optax

from jrc._errors import public
from jrc._extra_arguments import extended
from jrc._tree import added
from jrc._typing import Array, PyTree, Real, Transform
from jrc._validate import scalar
from jrc.dgc._config import DGCConfig, checked_momentum
from jrc.dgc._leaves import flatten, updates_of
from jrc.dgc._options import DGCOptions, call_text, with_options
from jrc.dgc._regularize import check_stateless
from jrc.dgc._state import DGCState, initial_state, is_placeholder
from jrc.dgc._update import state_after, step


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class InPlaceUpdate:
    """The `update` of an optax pair that can add its updates to the parameters itself.

    Called, it returns an array as large as each parameter, nearly all zeros. `apply` touches the
    entries that were sent and no others.

    Attributes:
        update: `(gradients, state, params, *, param_specs=None) -> (updates, state)`.
        apply: `(gradients, state, params, *, param_specs=None) -> (params, state)`.
        text: The call that made the pair, as which this prints.
    """

    update: Callable[..., tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any]]
    text: str

    def __call__(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        param_specs: PyTree = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        """Return updates and the new state; other extra arguments have no effect."""
        del extra_args
        return self.update(updates, state, params, param_specs=param_specs)

    def __repr__(self) -> str:
        return self.text


def applies_in_place(tx: Transform) -> bool:
    """Whether a transform is a compression that adds its updates to the parameters itself."""
    return isinstance(tx.update, InPlaceUpdate)


def apply_gradients(
    tx: Transform, gradients: PyTree, state: Any, params: PyTree, **extra_args: Any
) -> tuple[PyTree, Any]:
    """Return parameters and state after one step of an optax transform.

    That is `tx.update` and `optax.apply_updates`. Of `jrc.dgc_momentum` there is no array of
    updates: only the parameter entries that were sent are written. Under `jit` with donation, take
    parameters and state in the order in which you return them: JAX pairs donated arrays with
    results of the same shape, in order.

    Args:
        tx: Any optax transform.
        gradients: This replica's.
        state: From `tx.init` or the step before.
        params: The parameters.
        **extra_args: For `tx.update`, such as `param_specs`.

    Returns:
        The new parameters and the new state.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = jrc.dgc_momentum(0.5, 0.9, 0, sparsity=0.75, min_size=0)
        >>> params = jnp.zeros(4)
        >>> gradients = jnp.array([1.0, -4.0, 2.0, 3.0])
        >>> params, state = apply_gradients(tx, gradients, tx.init(params), params)
        >>> params.tolist()
        [0.0, 2.0, 0.0, 0.0]
    """
    if isinstance(tx.update, InPlaceUpdate):
        return tx.update.apply(gradients, state, params, **extra_args)
    updates, state = extended(tx).update(gradients, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


@with_options(DGCOptions, use_nesterov=False)
@public("jrc.scale_by_dgc")
def scale_by_dgc(
    momentum: Real | Array = 0.9, **options: Unpack[DGCOptions]
) -> optax.GradientTransformationExtraArgs:
    r"""Aggregate local gradients by sending each step only the entries of largest magnitude.

    $$u \leftarrow m u + G, \quad v \leftarrow v + u, \quad
    \Delta = \frac{1}{N} \sum_{\text{replicas}} \operatorname{top}_k(v)$$

    where G is the local gradient, clipped and regularized. Entries that are sent are cleared from
    u and v; the others stay in v, and are sent when they have grown. The transform replaces the
    all-reduce and the momentum, and so comes first in a chain: local gradients in, a direction
    that is equal on every replica out. Before `rampup_begin_step`, and for leaves below
    `min_size`, the direction is the ordinary momentum of the mean gradient.

    A gradient that is not finite, on any replica, skips the step on all of them: updates are zero
    and the state stays, except for the count of skipped steps.

    Args:
        momentum: m in [0, 1).
        sparsity: Share of the entries that is kept back, in [0, 1), one or one per level.
        rampup_begin_step: b, the first compressed step.
        rampup_step: R, steps over which the L levels are spread: level
            `min(int((t - b) * L / R), L - 1)` on step t.
        use_nesterov: Look ahead: `u <- m (u + G)`, `v <- v + u + G`.
        local_grad_clip_norm: C; from b on each compressed tensor's gradient is bounded to
            `C sqrt(N)` in its L2 norm, before anything is added to it.
        num_trainers: N, to be checked against the size of `axis_name`; without an axis only 1.
        axis_name: The mesh or pmap axis over which the replicas differ; `None` is one replica. A
            pair `(inner, outer)`: gradients are averaged over the inner axis, as within a host,
            and compressed between the replicas of the outer one. N, u, v and bytes are those of
            the outer axis.
        min_size: Entries from which on a floating leaf is compressed; 0 compresses all.
        factor_masking: Clear u too where an entry was sent, so that stale momentum does not
            move it the same way once more. It has a price: an entry that is sent every T steps,
            while its gradient is constant, loses the share `m (1 - m^T) / (T (1 - m))` of what
            momentum (not Nesterov's) would add up to: with m = 0.9 a hundredth at T = 1000, a tenth
            at 100, more than half at 10. Where training lags behind dense at 99 % or less, try
            `False` before another learning rate.
        regularization: A number, `G = g + number * w`, `jrc.l1_penalty(number)`, or any optax
            transform without state. Local, before anything is accumulated; also on the dense path.
        selector: Which entries are sent: a name, a value of `jrc.dgc`, or an object of your own
            with the methods of `jrc.dgc.Selector`. `"exact"`: per tensor the k of largest
            magnitude, `k = max(1, int(size * (1 - sparsity)))`, ties to the lowest index;
            `"global"`: as many of all tensors together; `"two_stage"`: the largest of each of the k
            blocks with the largest maxima; `"blocked"`: of each block of 16,384 its share of k;
            `"sampled"`: those above a threshold that a sample of the tensor gives. `"auto"`:
            `"blocked"` for a sharded exchange, else `"exact"`. A dense sum takes a threshold
            whatever the selector; of tensors with 131,072 entries or more, from a sample.
        wire: How entries are written: a name, a value of `jrc.dgc`, or an object with the methods
            of `jrc.dgc.Wire`. `"f32"`: 8 bytes an entry; `"bf16"`: 4; `"fp8"` or `"int8"` with a
            scale per block of 65,536: 3. What a short format rounds away stays in v.
        exchange: How entries reach the other replicas: a name, a value of `jrc.dgc`, or an object
            with the methods of `jrc.dgc.EntryExchange` or `jrc.dgc.TensorExchange`.
            `"allgather"` of the entries; `"sharded"`: to the owners of their blocks, who add up
            and send the largest sums, as many as one replica sent, to all, so that bytes do not
            grow with N (other sums stay in the owner's v); `"dense"`: a sum of the tensors, zero
            where nothing is sent; `"auto"`: for the last level the one that sends the fewest bytes
            (sharded only with `selector="blocked"`, because sharding drops entries), for the
            levels before it dense sums, which share one program and compile quickly.
        clip_scaling: `"sqrt"`, a bound of `C sqrt(N)` for mean gradients; `"rsqrt"`, one of
            `C / sqrt(N)`, right only for gradients of a loss that was divided by N, as Paddle's
            are: it is N times tighter.
        clip_before_rampup: Clip before b too.
        count_dtype: The dtype in which k is computed, `"float64"`, or `"float32"` for Paddle's
            count.
        param_specs: How parameters are split over other mesh axes than `axis_name`: a
            `PartitionSpec` for each, in their tree, or one for all. Each device then chooses and
            sends entries of its own shards. Needed where these axes are automatic; explicit axes
            and `check_vma=True` say it by types. `update` takes `param_specs` too.

    Returns:
        An optax transform with a `DGCState`. Updates have the parameters' dtypes, or the
        gradients' when `update` gets no parameters.

    Raises:
        ValueError: For an argument outside its range. From `update`: when the axis is not bound
            or has another size than `num_trainers`, when gradients do not fit the state or were
            reduced over the axis before, when parameters are needed and missing, for a leaf with
            2**31 entries or more unless `exchange="dense"`.
        TypeError: For an argument of the wrong kind, complex parameters, or a regularization
            with state.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_dgc(0.9, sparsity=0.75, min_size=0)
        >>> params = jnp.zeros(4)
        >>> updates, state = tx.update(jnp.array([1.0, -4.0, 2.0, 3.0]), tx.init(params), params)
        >>> updates.tolist(), state.v.tolist()
        ([0.0, -4.0, 0.0, 0.0], [[1.0, 0.0, 2.0, 3.0]])

    Source: Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication
    Bandwidth for Distributed Training", arXiv:1712.01887, section 3 and algorithms 1-4.
    """
    given: dict[str, Any] = {**options}
    text = call_text(scale_by_dgc, {"momentum": momentum, **given})
    value = checked_momentum(momentum, given.pop("use_nesterov"))
    config = DGCConfig(momentum=value, **given)

    @public("jrc.scale_by_dgc")
    def init(params: PyTree) -> Any:
        if config.regularization is not None:
            check_stateless(config.regularization, params)
        return initial_state(params, int(config.min_size), config.axis_name)

    @public("jrc.scale_by_dgc")
    def update(
        gradients: PyTree, state: Any, params: PyTree, *, param_specs: PyTree
    ) -> tuple[PyTree, DGCState]:
        trees, leaves = flatten(gradients, state, params, "update")
        leaves, report = step(trees, leaves, state, 1.0, config, param_specs)
        return updates_of(trees, leaves), state_after(state, leaves, report)

    @public("jrc.scale_by_dgc")
    def apply(
        gradients: PyTree,
        state: DGCState,
        params: PyTree,
        scale: Real | Array = 1.0,
        *,
        param_specs: PyTree = None,
    ) -> tuple[PyTree, DGCState]:
        trees, leaves = flatten(gradients, state, params, "apply")
        scalar(scale, "scale", remedy="Pass -0.1 to descend with a learning rate of 0.1.")
        new = [x if is_placeholder(x) else jnp.asarray(x) for x in trees.params or ()]
        # Sums of several replicas' entries are not rounded one by one to half precision.
        leaves = [
            dataclasses.replace(leaf, target=new[leaf.place])
            if leaf.compressed and new[leaf.place].dtype == "float32"
            else leaf
            for leaf in leaves
        ]
        direct = {leaf.place for leaf in leaves if leaf.target is not None}
        leaves, report = step(trees, leaves, state, scale, config, param_specs)
        for leaf in leaves:
            landed, old = leaf.target, new[leaf.place]
            new[leaf.place] = landed if leaf.place in direct else added(old, landed)
        return trees.treedef.unflatten(new), state_after(state, leaves, report)

    return optax.GradientTransformationExtraArgs(init, InPlaceUpdate(update, apply, text))
