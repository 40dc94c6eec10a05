"""The optax transform."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import optax

from jrc._typing import Array, PyTree
from jrc.dgc import _config
from jrc.dgc._clip import CLIP_SCALINGS
from jrc.dgc._collectives import AxisName
from jrc.dgc._config import Options
from jrc.dgc._momentum import Decay
from jrc.dgc._regularize import check_stateless
from jrc.dgc._schedule import COUNT_DTYPES
from jrc.dgc._selectors import Selector
from jrc.dgc._state import DGCState, initial_state
from jrc.dgc._update import apply_step, take_step
from jrc.dgc._wires import Wire


class DGCTransformation(optax.GradientTransformation):
    """An optax transform that can also write into the parameters what others would add to them.

    `update` returns an array as large as each parameter, nearly all zeros. `apply` touches the
    entries that were sent and no others.

    Attributes:
        init: `params -> state`.
        update: `(gradients, state, params) -> (updates, state)`.
        apply: `(gradients, state, params, scale=1.0) -> (params, state)`: adds `scale` times what
            `update` returns, up to the order of the additions. That of `jrc.dgc_momentum` knows its
            scale. Under `jit` with donation, take parameters and state in the order in which you
            return them: JAX pairs what is donated with results of the same shape, in order.
    """

    apply: Callable[..., tuple[Any, Any]]

    def __new__(
        cls, init: Any, update: Any, apply: Callable[..., tuple[Any, Any]]
    ) -> "DGCTransformation":
        """Join the three."""
        self = super().__new__(cls, init, update)
        self.apply = apply
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What a copy is made of."""
        return self.init, self.update, self.apply


def scale_by_dgc(
    momentum: float | Array = 0.9,
    *,
    sparsity: float | Sequence[float] = (0.999,),
    rampup_begin_step: int = 0,
    rampup_step: int = 1,
    use_nesterov: bool = False,
    local_grad_clip_norm: float | Array | None = None,
    num_trainers: int | None = None,
    axis_name: AxisName | None = None,
    min_size: int = 16384,
    factor_masking: bool = True,
    regularization: float | Array | optax.GradientTransformation | None = None,
    selector: Selector | str = "auto",
    wire: Wire | str = "f32",
    exchange: str = "auto",
    clip_scaling: str = "sqrt",
    clip_before_rampup: bool = False,
    count_dtype: str = "float64",
) -> DGCTransformation:
    r"""Aggregates local gradients by sending each step only the entries that matter.

    $$u \leftarrow m u + G, \quad v \leftarrow v + u, \quad
    \Delta = \frac{1}{N} \sum_{\text{replicas}} \operatorname{top}_k(v)$$

    where G is the local gradient, clipped and regularised; what is sent is cleared from u and v,
    and all else stays in v until it has grown. It takes the place of the all-reduce and of the
    momentum, and so stands first in a chain: local gradients in, a direction that is equal on
    every replica out. Before `rampup_begin_step`, and for leaves below `min_size`, the direction
    is the ordinary momentum of the mean gradient.

    A gradient that is not finite, on any replica, skips the step on all of them: updates are
    zeros and the state stays, but for the count of skipped steps.

    Args:
        momentum: m in [0, 1).
        sparsity: Share of the entries that is kept back, in [0, 1), one or one per level.
        rampup_begin_step: b, the first compressed step.
        rampup_step: R, steps over which the L levels are spread: level
            `min(int((t - b) * L / R), L - 1)` on step t.
        use_nesterov: Looks ahead: `u <- m (u + G)`, `v <- v + u + G`.
        local_grad_clip_norm: C; from b on each compressed tensor's gradient is bounded to
            `C sqrt(N)` in its L2 norm, before anything is added to it.
        num_trainers: N, if it is to be checked against the axis.
        axis_name: The mesh or pmap axis over which the replicas differ; `None` is one replica. A
            pair `(inner, outer)`: gradients are averaged over the inner one, as inside of a host,
            and compressed between those of the outer one. N, u, v and bytes are the outer one's.
        min_size: Entries from which on a floating leaf is compressed; 0 compresses all.
        factor_masking: Clears u too where an entry was sent, so that stale momentum does not
            push the same way again. It has a price: an entry that is sent every T steps, while
            its gradient stays as it is, loses the share `m (1 - m^T) / (T (1 - m))` of what
            momentum (not Nesterov's) would add up to: with m = 0.9 a hundredth at T = 1000, a tenth
            at 100, more than half at 10. Where training lags behind dense at 99 % or less, try
            `False` before another rate.
        regularization: A number, `G = g + number * w`, `jrc.l1_penalty(number)`, or any optax
            transform without state. Local, before anything is accumulated; leaves on the dense
            path included.
        selector: Which entries are sent, by name or as a value of `jrc.dgc`: `"exact"`, per tensor
            the k of largest magnitude, `k = max(1, int(size * (1 - sparsity)))`, ties to the lowest
            index; `"global"`, as many of all tensors together; `"two_stage"`, the largest of each
            of the k blocks with the largest maxima; `"blocked"`, of each block of 16,384 its share
            of k; `"sampled"`, those beyond a threshold that a sample of the tensor gives.
            `"auto"`: `"blocked"` for a sharded exchange, else `"exact"`. A level that is sent as a
            dense sum takes a threshold, whatever the selector; of tensors with 131,072 entries or
            more, from a sample.
        wire: `"f32"`, 8 bytes an entry; `"bf16"`, 4; `"fp8"` or `"int8"` with a scale per block of
            65,536, 3. What a short format loses stays in v.
        exchange: `"allgather"` of the entries; `"sharded"`: to the owners of their blocks, who add
            up, and of the sums as many as one replica sent back to all, so that bytes do not grow
            with N (what is not handed on stays in the owner's v); `"dense"`, a sum of the tensors
            with zeros where nothing is sent; `"auto"`: the last level in the way that sends the
            fewest bytes (sharded only with `selector="blocked"`, for sharding drops entries), and
            the levels before it as dense sums, which share one program and compile quickly.
        clip_scaling: `"sqrt"`, a bound of `C sqrt(N)` for mean gradients; `"rsqrt"`, one of
            `C / sqrt(N)`, right only for gradients of a loss that was divided by N, as Paddle's
            are: it is N times tighter.
        clip_before_rampup: Clips before b too.
        count_dtype: What k is computed in, `"float64"`, or `"float32"` for Paddle's count.

    Returns:
        An optax transform with a `DGCState`. Updates have the parameters' dtypes, or the
        gradients' when `update` gets no parameters.

    Raises:
        ValueError: For an argument outside its range. From `update`: when the axis is not bound
            or has another size than `num_trainers`, when gradients do not fit the state or were
            reduced over the axis before, when parameters are needed and missing.
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
    inner, outer = _config.checked_axes(axis_name)
    options = Options(
        decay=Decay(
            _config.checked_momentum(momentum), _config.checked_flag("use_nesterov", use_nesterov)
        ),
        sparsity=_config.checked_sparsity(sparsity),
        rampup_begin_step=_config.checked_int("rampup_begin_step", rampup_begin_step, 0),
        rampup_step=_config.checked_int("rampup_step", rampup_step, 1),
        local_grad_clip_norm=_config.checked_clip_norm(local_grad_clip_norm),
        axis_name=outer,
        inner_axis=inner,
        num_trainers=_config.checked_trainers(num_trainers, outer),
        min_size=_config.checked_int("min_size", min_size, 0),
        factor_masking=_config.checked_flag("factor_masking", factor_masking),
        regularization=_config.checked_regularization(regularization),
        selector=_config.checked_selector(selector, exchange),
        wire=_config.checked_wire(wire),
        exchange=_config.checked_choice("exchange", exchange, _config.EXCHANGES),
        clip_scaling=_config.checked_choice("clip_scaling", clip_scaling, CLIP_SCALINGS),
        clip_before_rampup=_config.checked_flag("clip_before_rampup", clip_before_rampup),
        count_dtype=_config.checked_choice("count_dtype", count_dtype, COUNT_DTYPES),
    )

    def init_fn(params: PyTree) -> DGCState:
        if options.regularization is not None:
            check_stateless(options.regularization, params)
        return initial_state(params, options.min_size, options.axis_name)

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return take_step(updates, cast(DGCState, state), params, options)

    def apply_fn(
        gradients: PyTree, state: DGCState, params: PyTree, scale: float | Array = 1.0
    ) -> tuple[PyTree, DGCState]:
        return apply_step(gradients, state, params, scale, options)

    return DGCTransformation(init_fn, update_fn, apply_fn)
