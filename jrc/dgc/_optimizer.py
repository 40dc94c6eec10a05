"""Momentum SGD with compressed gradients: the transform, the learning rate, and both at once."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jrc._typing import Array, PyTree
from jrc.dgc._options import checked_options
from jrc.dgc._selectors import Selector
from jrc.dgc._state import DGCState
from jrc.dgc._step import apply_step
from jrc.dgc._transform import transform_of
from jrc.dgc._wire import Wire


class DGCOptimizer(optax.GradientTransformation):
    """An optax optimizer that can also write into the parameters what others would add to them.

    `update` returns an array as large as each parameter, nearly all zeros. `apply` touches the
    entries that were sent and no others.

    Attributes:
        init: `params -> state`.
        update: `(gradients, state, params) -> (updates, state)`.
        apply: `(gradients, state, params) -> (params, state)`, what `update` and
            `optax.apply_updates` do, up to the order of the additions. A step that is skipped
            leaves the schedule of the learning rate where it is, too.
    """

    apply: Callable[[Any, Any, Any], tuple[Any, Any]]

    def __new__(cls, init: Any, update: Any, apply: Any) -> "DGCOptimizer":  # noqa: D102
        self = super().__new__(cls, init, update)
        self.apply = apply
        return self


def dgc_momentum(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | Array,
    rampup_begin_step: int,
    rampup_step: int = 1,
    sparsity: float | Sequence[float] = (0.999,),
    use_nesterov: bool = False,
    local_grad_clip_norm: float | Array | None = None,
    num_trainers: int | None = None,
    regularization: float | Array | optax.GradientTransformation | None = None,
    *,
    axis_name: str | tuple[str, str] | None = None,
    min_size: int = 16384,
    factor_masking: bool = True,
    selector: Selector | str = "auto",
    wire: Wire | str = "f32",
    exchange: str = "auto",
) -> DGCOptimizer:
    r"""Momentum SGD whose gradients are compressed: `scale_by_dgc`, then the learning rate.

    $$w \leftarrow w - \eta \, \Delta$$

    Args:
        learning_rate: Eta, a number or an optax schedule.
        momentum: See `scale_by_dgc`, as for all that follow.
        rampup_begin_step: The first compressed step.
        rampup_step: Steps over which the sparsity levels are spread.
        sparsity: Share of the entries that is kept back, one or one per level.
        use_nesterov: Looks ahead.
        local_grad_clip_norm: Bound of each compressed tensor's local gradient.
        num_trainers: Number of replicas, if it is to be checked.
        regularization: L2 factor, or a transform of local gradients without state.
        axis_name: The axis over which the replicas differ.
        min_size: Entries from which on a leaf is compressed.
        factor_masking: Clears the velocity too where an entry was sent.
        selector: How entries are chosen.
        wire: How an entry is written.
        exchange: How entries reach the other replicas.

    Returns:
        An optax optimizer, with `apply` besides.

    Raises:
        ValueError: As `scale_by_dgc`.
        TypeError: As `scale_by_dgc`.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = dgc_momentum(0.5, 0.9, rampup_begin_step=0, sparsity=0.75, min_size=0)
        >>> params = jnp.zeros(4)
        >>> updates, _ = tx.update(jnp.array([1.0, -4.0, 2.0, 3.0]), tx.init(params), params)
        >>> optax.apply_updates(params, updates).tolist()
        [0.0, 2.0, 0.0, 0.0]

    Source: Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication
    Bandwidth for Distributed Training", arXiv:1712.01887, section 3.
    """
    options = checked_options(
        momentum,
        sparsity=sparsity,
        rampup_begin_step=rampup_begin_step,
        rampup_step=rampup_step,
        use_nesterov=use_nesterov,
        local_grad_clip_norm=local_grad_clip_norm,
        num_trainers=num_trainers,
        axis_name=axis_name,
        min_size=min_size,
        factor_masking=factor_masking,
        regularization=regularization,
        selector=selector,
        wire=wire,
        exchange=exchange,
    )
    rate = optax.scale_by_learning_rate(learning_rate)
    chained = optax.chain(transform_of(options), rate)

    def apply(gradients: PyTree, state: optax.OptState, params: PyTree) -> tuple[PyTree, PyTree]:
        compression, schedule = cast(tuple[DGCState, optax.OptState], state)
        # Whatever the rate is, and of whatever schedule: what it makes of a one.
        scale, after = rate.update(jnp.ones(()), schedule)
        params, new = apply_step(gradients, compression, params, scale, options)
        waits = new.skipped != compression.skipped
        after = jax.tree.map(lambda x, y: jnp.where(waits, x, y), schedule, after)
        return params, (new, after)

    return DGCOptimizer(chained.init, chained.update, apply)
