"""Paddle's RecomputeOptimizer."""

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from jrc._errors import public
from jrc.compat.paddle._optimizer import Optimizer, method


class RecomputeOptimizer(Optimizer):
    """An optimizer whose backward pass recomputes the segments between boundaries.

    Args:
        optimizer: Any optax transform, or another optimizer of `jrc.compat`.

    Raises:
        TypeError: If `optimizer` has no `init` and `update`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> def loss_fn(params, x):
        ...     fc_1 = jrc.mark(x @ params["fc_1"], "fc_1")
        ...     return jnp.mean(jrc.mark(jnp.sin(fc_1) @ params["pred"], "pred") ** 2)
        >>> params = {"fc_1": jnp.ones((3, 4)), "pred": jnp.ones((4, 2))}
        >>> opt = jrc.compat.RecomputeOptimizer(optax.adam(0.01))
        >>> opt._set_checkpoints(["fc_1", "pred"])
        >>> opt_state = opt.init(params)
        >>> for _ in range(2):
        ...     params, opt_state, loss, params_grads = opt.minimize(
        ...         loss_fn, params, opt_state, jnp.ones((2, 3))
        ...     )
        >>> [name for name, _ in params_grads], loss.shape
        (['fc_1', 'pred'], ())

    Source: Paddle `python/paddle/fluid/optimizer.py`, `RecomputeOptimizer`.
    """

    @public("jrc.compat.RecomputeOptimizer")
    def __init__(self, optimizer: Any) -> None:
        if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
            raise TypeError(
                "optimizer must be an optax transform or one of "
                f"jrc.compat, got {type(optimizer).__name__}. Write "
                "RecomputeOptimizer(optax.adam(0.01))."
            )
        tx = getattr(optimizer, "tx", optimizer)
        listed = getattr(optimizer, "parameter_list", None)
        super().__init__(tx, listed, getattr(optimizer, "axis_name", None))
        self._checkpoints: tuple[str, ...] | None = None

    @public("jrc.compat.RecomputeOptimizer")
    def _set_checkpoints(self, checkpoints: Sequence[str]) -> None:
        """Set the boundaries.

        Args:
            checkpoints: A list of `jrc.mark` names, the boundaries of `jrc.recompute_segments` with
                `rule="fluid"`. An empty list recomputes nothing. A name that is no mark of the loss
                function is ignored, with a warning at its first use.

        Raises:
            TypeError: If `checkpoints` is not a list of strings.
        """
        rule = "checkpoints must be a list of mark names"
        remedy = "Mark values with jrc.mark(x, 'fc_1') and pass ['fc_1']."
        if not isinstance(checkpoints, list | tuple):
            raise TypeError(f"{rule}, got {type(checkpoints).__name__} {checkpoints!r}. {remedy}")
        for name in checkpoints:
            if not isinstance(name, str):
                raise TypeError(f"{rule}, got one with {type(name).__name__}. {remedy}")
        self._checkpoints = tuple(checkpoints)

    set_checkpoints = _set_checkpoints

    def _boundaries(self) -> Sequence[str]:
        if self._checkpoints is None:
            raise ValueError(
                "checkpoints must be set before, to a list of mark names, got none. Write "
                "opt._set_checkpoints(['fc_1', 'pred'])."
            )
        return self._checkpoints

    @method
    def load(self, stat_dict: Any = None, *, state_dict: Any = None) -> NoReturn:
        """Raise, as in Paddle: there is no state in the object.

        Args:
            stat_dict: A saved state, or its path.
            state_dict: The same, by its name in newer versions of Paddle.

        Raises:
            NotImplementedError: Always.
        """
        saved = state_dict if stat_dict is None else stat_dict
        path = saved if isinstance(saved, str | os.PathLike) else "path"
        kind = type(saved).__name__
        raise NotImplementedError(
            "load function is not supported by Recompute "
            f"Optimizer for now, got {repr(saved) if path is saved else kind}. The state is an "
            f"argument of minimize: write opt_state = jrc.restore({str(path)!r}, opt.init(params))."
        )
