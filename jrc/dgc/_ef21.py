"""EF21 with momentum: an estimate of the mean gradient, of which each step sends changes alone."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from jrc._errors import public
from jrc._typing import Array, PyTree, Real
from jrc._validate import scalar
from jrc.dgc._config import DGCConfig, Number
from jrc.dgc._leaves import flatten, updates_of
from jrc.dgc._momentum import Average
from jrc.dgc._options import EF21Options, with_options
from jrc.dgc._state import EF21State, initial_estimates, initial_state
from jrc.dgc._update import state_after, step


@with_options(EF21Options, sparsity=0.99, rampup_begin_step=1)
@public("jrc.scale_by_ef21")
def scale_by_ef21(
    momentum_rate: Real | Array = 0.1, **options: Unpack[EF21Options]
) -> optax.GradientTransformationExtraArgs:
    r"""Estimate the mean of the replicas' averaged gradients, sending the largest changes.

    $$M_i \leftarrow (1 - \eta) M_i + \eta G_i, \quad
    c_i = \operatorname{top}_k(M_i - g_i), \quad g_i \leftarrow g_i + c_i, \quad
    g \leftarrow g + \frac{1}{N} \sum_i c_i$$

    where G is the local gradient of replica i. Updates are g: dense, equal on every replica, bit
    for bit. So AdamW works behind it, with momentum here in the place of Adam's own:

    ```python
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),  # of each replica's own gradient
        jrc.scale_by_ef21(0.1, axis_name="data"),
        optax.scale_by_adam(b1=0.0),
        optax.add_decayed_weights(0.01),
        optax.scale_by_learning_rate(3e-4),
    )
    ```

    The first gradient is M as it is. Steps before `rampup_begin_step` send everything, and leaves
    below `min_size` always do: g and every M are then the average of the mean gradient. With
    `rampup_begin_step=0` an entry has g = 0 until it is sent for the first time, and Adam's second
    moment of it is then far too small: keep the dense step at the beginning, or take some more.

    A gradient that is not finite, on any replica, skips the step on all of them: updates are zero
    and the state stays, except for the count of skipped steps.

    Args:
        momentum_rate: Eta in (0, 1], one minus Adam's b1.
        sparsity: Share of the entries that is kept back, one or one per level; for this and what
            follows see `jrc.scale_by_dgc`.
        rampup_begin_step: The first step that sends less than everything.
        rampup_step: Steps over which the sparsity levels are spread.
        num_trainers: N, to be checked against the size of `axis_name`.
        axis_name: The axis over which the replicas differ, or a pair `(inner, outer)`.
        min_size: Entries from which on a floating leaf is compressed; 0 compresses all.
        selector: How entries of the changes are chosen.
        wire: How an entry is written. What a short format rounds away is sent later.
        exchange: How entries reach the other replicas.
        param_specs: How parameters are split over other mesh axes.

    Returns:
        An optax transform with an `EF21State`: three float32 numbers for each parameter of a
        compressed leaf. `jrc.make_train_step`, `jrc.save`, `jrc.dgc_specs`, `jrc.reshard` and
        `jrc.dgc_stats` take it as they take a `DGCState`.

    Raises:
        ValueError: For an argument outside its range; from `update` as `jrc.scale_by_dgc`.
        TypeError: For an argument of the wrong kind, or complex parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_ef21(0.5, sparsity=0.75, rampup_begin_step=0, min_size=0)
        >>> params = jnp.zeros(4)
        >>> updates, state = tx.update(jnp.array([1.0, -4.0, 2.0, 3.0]), tx.init(params), params)
        >>> updates.tolist(), state.v.tolist()
        ([0.0, -4.0, 0.0, 0.0], [[1.0, 0.0, 2.0, 3.0]])
        >>> updates, state = tx.update(jnp.array([1.0, -2.0, 2.0, 3.0]), state, params)
        >>> updates.tolist(), state.u.tolist()
        ([0.0, -4.0, 0.0, 3.0], [[1.0, -3.0, 2.0, 3.0]])

    Source: Fatkhullin, Tyurin and Richtarik, "Momentum Provably Improves Error Feedback!",
    arXiv:2305.15155, algorithm 1 (EF21-SGDM). v is kept in the place of g_i = M_i - v_i.
    """
    rate = _checked_rate(momentum_rate)
    config = DGCConfig(momentum=Average(rate), factor_masking=False, **options)

    @public("jrc.scale_by_ef21")
    def init(params: PyTree) -> Any:
        state = initial_state(params, int(config.min_size), config.axis_name)
        estimates = initial_estimates(params, config.axis_name)
        return EF21State(*state._replace(velocity=estimates))

    @public("jrc.scale_by_ef21")
    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        param_specs: PyTree = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        del extra_args
        trees, leaves = flatten(updates, state, params, "update", EF21State)
        # What is sent is added to the estimates: the velocity of every leaf.
        leaves = [
            dataclasses.replace(leaf, target=leaf.velocity, velocity=None)
            if leaf.compressed
            else leaf
            for leaf in leaves
        ]
        leaves, report = step(trees, leaves, state, 1.0, config, param_specs)
        leaves = [
            dataclasses.replace(leaf, velocity=leaf.target) if leaf.compressed else leaf
            for leaf in leaves
        ]
        taken = [
            dataclasses.replace(leaf, target=jnp.where(report.ok, leaf.velocity, 0.0))
            for leaf in leaves
        ]
        return updates_of(trees, taken), state_after(state, leaves, report)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked_rate(rate: Any) -> Number:
    rate = scalar(
        rate,
        "momentum_rate",
        rule="in (0, 1]",
        holds=lambda r: 0 < r <= 1,
        remedy="Pass 0.1, one minus Adam's b1.",
    )
    return jnp.asarray(rate, jnp.float32) if isinstance(rate, jax.Array) else float(rate)
