"""Paddle's DGC optimizer."""

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from jrc._errors import close_to, listed, public, speaking_as
from jrc._typing import Array, PyTree, Real, Whole
from jrc._validate import is_real, whole_number
from jrc.compat.paddle._names import Name, checked_names
from jrc.compat.paddle._optimizer import Optimizer
from jrc.dgc import dgc_momentum, l1_penalty, l2_penalty
from jrc.persist import restore

_ONLY_HERE = ("axis_name",)
"""Keyword-only arguments of `jrc.dgc_momentum` that the optimizer has by name."""

_OPTIONS = tuple(
    name
    for name, argument in inspect.signature(dgc_momentum).parameters.items()
    if argument.kind is argument.KEYWORD_ONLY and name not in _ONLY_HERE
)
"""The other keyword-only arguments of `jrc.dgc_momentum`, which pass through."""


class DGCMomentumOptimizer(Optimizer):
    """Momentum SGD with compressed gradients: `jrc.dgc_momentum` with Paddle's methods.

    Under `jax.shard_map` over `axis_name` it keeps gradients local to each replica until they are
    compressed; the loss and the pairs that `minimize` returns are local too.

    In Paddle the trainers find each other through the program, and `num_trainers` is their number.
    Here `axis_name` is the mesh axis along which the trainers differ: N trainers are
    `num_trainers=N, axis_name="data"` under `jax.shard_map` over a mesh whose axis `"data"` has
    size N, which is checked. Without `axis_name` there is one trainer and `num_trainers` is 1 or
    left out.

    Args:
        learning_rate: A number or an optax schedule.
        momentum: In [0, 1).
        rampup_begin_step: The first compressed step.
        rampup_step: Steps over which the sparsity levels are spread.
        sparsity: Share of the entries that is kept back, one for each level.
        use_nesterov: Look ahead.
        local_grad_clip_norm: Bound of each compressed tensor's gradient; needs `num_trainers`.
        num_trainers: Number of replicas, the size of `axis_name`.
        regularization: L2 factor; an optax transform of local gradients without state, such as
            `jrc.l1_penalty(1e-4)`; or Paddle's `L1Decay` or `L2Decay`.
        name: Stored, without effect.
        parameter_list: Names of the parameters to update, where a method is not given others. A
            later Paddle has it.
        grad_clip: `local_grad_clip_norm` as a later Paddle has it: a number, or an object with a
            `clip_norm`, as Paddle's `ClipGradByNorm`.
        axis_name: The mesh axis along which the replicas differ; `None` is one replica.
        **options: More of `jrc.dgc_momentum`: `min_size`, `factor_masking`, `selector`, `wire`,
            `exchange`, `clip_scaling`, `clip_before_rampup`, `count_dtype`.

    Raises:
        TypeError: If the bound, `num_trainers` or `parameter_list` is of another kind, for an
            unknown option, and as `jrc.dgc_momentum`.
        ValueError: If both bounds are given, and as `jrc.dgc_momentum`.

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

    @public("jrc.compat.DGCMomentumOptimizer")
    def __init__(
        self,
        learning_rate: optax.ScalarOrSchedule,
        momentum: Real | Array,
        rampup_begin_step: Whole,
        rampup_step: Whole = 1,
        sparsity: Real | Sequence[Real] = (0.999,),
        use_nesterov: bool = False,
        local_grad_clip_norm: Real | Array | None = None,
        num_trainers: Whole | None = None,
        regularization: Any = None,
        name: str | None = None,
        parameter_list: Sequence[Name] | None = None,
        grad_clip: Any = None,
        *,
        axis_name: str | None = None,
        **options: Any,
    ) -> None:
        checked_names("parameter_list", parameter_list, ordered=True)
        _check_options(options)
        with speaking_as("jrc.compat.DGCMomentumOptimizer", "jrc.dgc_momentum"):
            tx = dgc_momentum(
                learning_rate,
                momentum,
                rampup_begin_step,
                rampup_step,
                sparsity,
                use_nesterov,
                _clip_norm(local_grad_clip_norm, grad_clip, num_trainers),
                num_trainers,
                _penalty(regularization),
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
    """Raise for a name that neither Paddle's optimizer nor `jrc.dgc_momentum` has."""
    known = (*_OPTIONS, *inspect.signature(DGCMomentumOptimizer).parameters)
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(
                f"an option besides Paddle's arguments must be one of {listed(_OPTIONS)}, "
                f"got {name!r}{close_to(name, known)}. The bound of a gradient "
                "is local_grad_clip_norm, or grad_clip."
            )


def _penalty(regularization: Any) -> Any:
    """Return Paddle's regularizer, known by its class and coefficient, as a transform."""
    factor = getattr(regularization, "_regularization_coeff", None)
    kind = type(regularization).__name__[:2]
    if factor is None or kind not in ("L1", "L2"):
        return regularization
    return (l1_penalty if kind == "L1" else l2_penalty)(factor)


def _clip_norm(norm: Any, grad_clip: Any, num_trainers: Any) -> Any:
    """Return the bound of `jrc.dgc_momentum`, given by either of Paddle's two names."""
    if norm is not None and grad_clip is not None:
        raise ValueError(
            "local_grad_clip_norm must be left out where there is a grad_clip, got "
            f"{norm!r} and {grad_clip!r}. Pass one of them: both bound each tensor's gradient."
        )
    name = "grad_clip" if norm is None else "local_grad_clip_norm"
    bound = getattr(grad_clip, "clip_norm", grad_clip) if norm is None else norm
    if bound is None:
        return None
    if not (is_real(bound) or isinstance(bound, jax.Array)):
        kind = type(norm if norm is not None else grad_clip).__name__
        raise TypeError(
            f"{name} must be the bound of each tensor's norm, a number or an object with a "
            f"clip_norm, got {kind}. Write {name}=1.0."
        )
    remedy = (
        "The bound grows with its square root: write num_trainers=4, axis_name='data' for four "
        "replicas, num_trainers=1 for one."
    )
    text = f"num_trainers, where there is a {name},"
    whole_number(num_trainers, text, least=1, remedy=remedy)
    return bound
