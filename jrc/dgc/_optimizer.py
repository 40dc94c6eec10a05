"""Momentum SGD with compressed gradients: the transform, the learning rate, and both at once."""

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import optax

from jrc._errors import speaking_as
from jrc._typing import Array, PyTree
from jrc.dgc._collectives import AxisName
from jrc.dgc._config import check_rate
from jrc.dgc._selectors import Selector
from jrc.dgc._state import DGCState
from jrc.dgc._transform import DGCTransformation, scale_by_dgc
from jrc.dgc._wires import Wire

_WHO = "jrc.dgc_momentum"


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
    axis_name: AxisName | None = None,
    min_size: int = 16384,
    factor_masking: bool = True,
    selector: Selector | str = "auto",
    wire: Wire | str = "f32",
    exchange: str = "auto",
    clip_scaling: str = "sqrt",
    clip_before_rampup: bool = False,
    count_dtype: str = "float64",
) -> DGCTransformation:
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
        clip_scaling: How the bound of a gradient grows with the number of replicas.
        clip_before_rampup: Clips before the first compressed step too.
        count_dtype: What the number of entries is computed in.

    Returns:
        An optax optimizer. Besides `init` and `update` it has `apply(gradients, state, params) ->
        (params, state)`, which does what `update` and `optax.apply_updates` do without an array of
        updates; there, a step that is skipped leaves the learning rate's schedule where it is.

    Raises:
        ValueError: As `scale_by_dgc`, and for a learning rate that is not finite.
        TypeError: As `scale_by_dgc`, for a learning rate that is neither a number nor a schedule,
            and from `update` and `apply` for the state of another optimizer.

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
    check_rate(learning_rate, _WHO)
    with speaking_as(_WHO, "jrc.scale_by_dgc"):
        direction = scale_by_dgc(
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
            clip_scaling=clip_scaling,
            clip_before_rampup=clip_before_rampup,
            count_dtype=count_dtype,
        )
    rate = optax.scale_by_learning_rate(learning_rate)
    chained = optax.chain(direction, rate)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        _check_state(state)
        return chained.update(updates, state, params)

    def apply(gradients: PyTree, state: optax.OptState, params: PyTree) -> tuple[PyTree, PyTree]:
        _check_state(state)
        compression, schedule = cast(tuple[DGCState, optax.OptState], state)
        # Whatever the rate is, and of whatever schedule: what it makes of a one.
        scale, after = rate.update(jnp.ones(()), schedule)
        params, new = direction.apply(gradients, compression, params, scale)
        waits = new.skipped != compression.skipped
        after = jax.tree.map(lambda x, y: jnp.where(waits, x, y), schedule, after)
        return params, (new, after)

    return DGCTransformation(chained.init, update, apply)


def _check_state(state: object) -> None:
    """Refuse the state of another optimizer, which would fail somewhere inside of optax."""
    if not (isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], DGCState)):
        raise TypeError(
            f"{_WHO}: the state must be what init(params) returns, got {type(state).__name__}; "
            "start with state = tx.init(params)"
        )
