"""The seed's DGC optimizer."""

import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import jax
import optax

from jrc._errors import close_to, listed, speaking_as
from jrc._typing import Array, PyTree
from jrc.compat._optimizer import Optimizer
from jrc.compat._request import checked_names
from jrc.dgc import dgc_momentum, l1_penalty, l2_penalty
from jrc.persist import restore

_WHO = "jrc.compat.DGCMomentumOptimizer"

_OPTIONS = (
    "min_size",
    "factor_masking",
    "selector",
    "wire",
    "exchange",
    "clip_scaling",
    "clip_before_rampup",
    "count_dtype",
)


class DGCMomentumOptimizer(Optimizer):
    """Momentum SGD whose gradients are compressed: `jrc.dgc_momentum` with the seed's methods.

    Under `jax.shard_map` over `axis_name` it takes care that gradients stay local to each
    replica until they are compressed; loss and pairs that `minimize` returns are local too.

    Args:
        learning_rate: A number or an optax schedule.
        momentum: In [0, 1).
        rampup_begin_step: The first compressed step.
        rampup_step: Steps over which the sparsity levels are spread.
        sparsity: Share of the entries that is kept back, one for each level.
        parameter_list: Names of the parameters to update, where a method is not given others.
        use_nesterov: Looks ahead.
        num_trainers: Number of replicas; must be given with `grad_clip`.
        regularization: L2 factor; an optax transform of local gradients without state, such as
            `jrc.l1_penalty(1e-4)`; or the seed's `L1Decay` or `L2Decay`.
        grad_clip: Bound of each compressed tensor's gradient: a number, or an object with a
            `clip_norm`, as the seed's `ClipGradByNorm`.
        name: Kept, and used for nothing.
        axis_name: The axis over which the replicas differ; `None` is one replica.
        **options: More of `jrc.dgc_momentum`: `min_size`, `factor_masking`, `selector`, `wire`,
            `exchange`, `clip_scaling`, `clip_before_rampup`, `count_dtype`.

    Raises:
        TypeError: If `grad_clip`, `num_trainers` or `parameter_list` is of another kind, for an
            unknown option, and as `jrc.dgc_momentum`.
        ValueError: As `jrc.dgc_momentum`.

    Example:
        >>> import jax.numpy as jnp
        >>> opt = jrc.compat.DGCMomentumOptimizer(0.5, 0.9, 0, sparsity=[0.75], min_size=0)
        >>> params = {"w": jnp.array([1.0, 2.0, 3.0, 4.0])}
        >>> def loss_fn(params):
        ...     return jnp.sum(params["w"] ** 2) / 2
        >>> params, opt_state, loss, _ = opt.minimize(loss_fn, params, opt.init(params))
        >>> float(loss), params["w"].tolist()
        (15.0, [1.0, 2.0, 3.0, 2.0])

    Source: Paddle `python/paddle/fluid/optimizer.py`, `DGCMomentumOptimizer`.
    """

    def __init__(
        self,
        learning_rate: optax.ScalarOrSchedule,
        momentum: float | Array,
        rampup_begin_step: int,
        rampup_step: int = 1,
        sparsity: float | Sequence[float] = (0.999,),
        parameter_list: Sequence[str] | None = None,
        use_nesterov: bool = False,
        num_trainers: int | None = None,
        regularization: float | Array | optax.GradientTransformation | None = None,
        grad_clip: Any = None,
        name: str | None = None,
        *,
        axis_name: str | None = None,
        **options: Any,
    ) -> None:
        checked_names(_WHO, "parameter_list", parameter_list, ordered=True)
        _check_options(options)
        whole = isinstance(num_trainers, Integral) and not isinstance(num_trainers, bool)
        with speaking_as(_WHO, "jrc.dgc_momentum"):
            tx = dgc_momentum(
                learning_rate,
                momentum,
                rampup_begin_step,
                rampup_step,
                sparsity,
                use_nesterov,
                local_grad_clip_norm=_clip_norm(grad_clip, num_trainers),
                num_trainers=int(num_trainers) if whole else num_trainers,
                regularization=_penalty(regularization),
                axis_name=axis_name,
                **options,
            )
        super().__init__(tx, parameter_list, axis_name)
        self.name = name

    def load(self, path: str | os.PathLike[str], like: PyTree) -> PyTree:
        """Read back a saved state, with the momentum and the gradients not yet sent.

        Args:
            path: The folder that `jrc.save` was given.
            like: A tree like the saved one: `init(params)`, or a larger one that holds it.

        Returns:
            The saved tree, bit for bit.

        Raises:
            FileNotFoundError: If there is no whole save.
            ValueError: If the saved tree is another one.
        """
        return restore(path, like)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what neither the seed's optimizer nor `jrc.dgc_momentum` takes."""
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(
                f"{_WHO}: besides the seed's arguments there are {listed(_OPTIONS)}; got {name!r}"
                f"{close_to(name, (*_OPTIONS, 'grad_clip'))}. The bound of a gradient is grad_clip."
            )


def _penalty(regularization: Any) -> Any:
    """The seed's regularizer, known by its class and coefficient, as a transform."""
    factor = getattr(regularization, "_regularization_coeff", None)
    kind = type(regularization).__name__[:2]
    if factor is None or kind not in ("L1", "L2"):
        return regularization
    return (l1_penalty if kind == "L1" else l2_penalty)(factor)


def _clip_norm(grad_clip: Any, num_trainers: int | None) -> float | Array | None:
    """The seed's two arguments as the bound of `jrc.dgc_momentum`."""
    if grad_clip is None:
        return None
    norm = getattr(grad_clip, "clip_norm", grad_clip)
    if isinstance(norm, bool) or not isinstance(norm, Real | jax.Array):
        raise TypeError(
            f"{_WHO}: grad_clip is the bound of each tensor's norm, a number or an object with a "
            f"clip_norm; got {type(grad_clip).__name__}. Write grad_clip=1.0."
        )
    whole = isinstance(num_trainers, Integral) and not isinstance(num_trainers, bool)
    if not whole or num_trainers < 1:
        error = ValueError if whole else TypeError
        raise error(
            f"{_WHO}: num_trainers should be int and greater than zero where there is a "
            f"grad_clip, which grows with its square root; got {num_trainers!r}. Write "
            "num_trainers=4 for four replicas."
        )
    return norm if isinstance(norm, jax.Array) else float(norm)
