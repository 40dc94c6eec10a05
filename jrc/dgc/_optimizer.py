"""Momentum SGD with compressed gradients: the transform, then the learning rate."""

from collections.abc import Sequence
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import optax

from jrc._errors import public, speaking_as
from jrc._typing import Array, PyTree, Real, Whole
from jrc._validate import scalar
from jrc.dgc._options import MomentumOptions, call_text, with_options
from jrc.dgc._state import DGCState
from jrc.dgc._transform import InPlaceUpdate, scale_by_dgc


@with_options(MomentumOptions)
@public("jrc.dgc_momentum")
def dgc_momentum(
    learning_rate: optax.ScalarOrSchedule,
    momentum: Real | Array,
    rampup_begin_step: Whole,
    rampup_step: Whole = 1,
    sparsity: Real | Sequence[Real] = (0.999,),
    use_nesterov: bool = False,
    local_grad_clip_norm: Real | Array | None = None,
    num_trainers: Whole | None = None,
    regularization: Real | Array | optax.GradientTransformation | None = None,
    **options: Unpack[MomentumOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Return momentum SGD with compressed gradients: `scale_by_dgc`, then the learning rate.

    $$w \leftarrow w - \eta \, \Delta$$

    Args:
        learning_rate: Eta, a number or an optax schedule.
        momentum: See `scale_by_dgc`, as for all that follow.
        rampup_begin_step: The first compressed step.
        rampup_step: Steps over which the sparsity levels are spread.
        sparsity: Share of the entries that is kept back, one or one per level.
        use_nesterov: Look ahead.
        local_grad_clip_norm: Bound of each compressed tensor's local gradient.
        num_trainers: Number of replicas, to be checked against the size of `axis_name`.
        regularization: L2 factor, or a transform of local gradients without state.
        axis_name: The axis over which the replicas differ.
        min_size: Entries from which on a leaf is compressed.
        factor_masking: Clear the velocity too where an entry was sent.
        selector: How entries are chosen.
        wire: How an entry is written.
        exchange: How entries reach the other replicas.
        clip_scaling: How the bound of a gradient grows with the number of replicas.
        clip_before_rampup: Clip before the first compressed step too.
        count_dtype: The dtype in which the number of entries is computed.
        param_specs: How parameters are split over other mesh axes.

    Returns:
        An optax optimizer. `jrc.dgc.apply_gradients(tx, gradients, state, params)` does what
        `update` and `optax.apply_updates` do without an array of updates. A step that is skipped
        does not advance the learning rate's schedule.

    Raises:
        ValueError: As `scale_by_dgc`, and for a learning rate that is not finite.
        TypeError: As `scale_by_dgc`, for a learning rate that is neither a number nor a schedule,
            and from `update` for the state of another optimizer.

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
    given: dict[str, Any] = {
        "momentum": momentum,
        "rampup_begin_step": rampup_begin_step,
        "rampup_step": rampup_step,
        "sparsity": sparsity,
        "use_nesterov": use_nesterov,
        "local_grad_clip_norm": local_grad_clip_norm,
        "num_trainers": num_trainers,
        "regularization": regularization,
        **options,
    }
    text = call_text(dgc_momentum, {"learning_rate": learning_rate, **given})
    _check_rate(learning_rate)
    with speaking_as("jrc.dgc_momentum", "jrc.scale_by_dgc"):
        direction = scale_by_dgc(**given)
    in_place = cast(InPlaceUpdate, direction.update)
    rate = optax.scale_by_learning_rate(learning_rate)

    def init(params: PyTree) -> Any:
        return direction.init(params), rate.init(params)

    @public("jrc.dgc_momentum")
    def update(
        gradients: PyTree, state: Any, params: PyTree, *, param_specs: PyTree
    ) -> tuple[PyTree, Any]:
        compression, schedule = _parts(state)
        updates, new = in_place(gradients, compression, params, param_specs=param_specs)
        updates, after = rate.update(updates, schedule, params)
        return updates, (new, _unless_skipped(compression, new, schedule, after))

    @public("jrc.dgc_momentum")
    def apply(
        gradients: PyTree, state: Any, params: PyTree, *, param_specs: PyTree = None
    ) -> tuple[PyTree, Any]:
        compression, schedule = _parts(state)
        # Whatever the rate is, and of whatever schedule: its update of a one is the scale.
        scale, after = rate.update(jnp.ones(()), schedule)
        specs = {"param_specs": param_specs}
        params, new = in_place.apply(gradients, compression, params, scale, **specs)
        return params, (new, _unless_skipped(compression, new, schedule, after))

    return optax.GradientTransformationExtraArgs(init, InPlaceUpdate(update, apply, text))


def _unless_skipped(before: DGCState, after: Any, old: PyTree, new: PyTree) -> PyTree:
    """Return the new state of the schedule, or the old one if the step was skipped."""
    skipped = after.skipped != before.skipped
    return jax.tree.map(lambda x, y: jnp.where(skipped, x, y), old, new)


def _check_rate(rate: Any) -> None:
    """Raise if a learning rate is neither a number nor a schedule; optax finds that late."""
    if not callable(rate):
        scalar(rate, "learning_rate", remedy="Pass 0.1, or an optax schedule.")


def _parts(state: object) -> tuple[Any, optax.OptState]:
    """Return the compression's state and the schedule's."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], DGCState):
        return cast(tuple[Any, optax.OptState], state)
    raise TypeError(
        f"state must be the one that init(params) returns, got {type(state).__name__}. "
        "Start with state = tx.init(params)."
    )
