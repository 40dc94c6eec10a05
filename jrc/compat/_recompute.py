"""The seed's recompute optimizer."""

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from jrc.compat._optimizer import Optimizer


class RecomputeOptimizer(Optimizer):
    """An optimizer whose backward pass re-runs what lies between boundaries.

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

    def __init__(self, optimizer: Any) -> None:
        if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
            raise TypeError(
                "jrc.compat.RecomputeOptimizer: the optimizer is an optax transform or one of "
                f"jrc.compat; got {type(optimizer).__name__}. Write "
                "RecomputeOptimizer(optax.adam(0.01))."
            )
        tx = getattr(optimizer, "tx", optimizer)
        listed = getattr(optimizer, "parameter_list", None)
        super().__init__(tx, listed, getattr(optimizer, "axis_name", None))
        self._checkpoints: tuple[str, ...] | None = None

    def _set_checkpoints(self, checkpoints: Sequence[str]) -> None:
        """Say where to cut.

        Args:
            checkpoints: A list of `jrc.mark` names; see `jrc.recompute_segments`, which gets them
                with `rule="fluid"`. An empty list re-runs nothing.

        Raises:
            TypeError: If that is no list, or holds anything else than strings.
        """
        who = "jrc.compat.RecomputeOptimizer: _checkpoints should be a list of strings"
        way_out = "Mark values with jrc.mark(x, 'fc_1') and pass ['fc_1']."
        if not isinstance(checkpoints, list | tuple):
            raise TypeError(f"{who}; got {type(checkpoints).__name__} {checkpoints!r}. {way_out}")
        for name in checkpoints:
            if not isinstance(name, str):
                raise TypeError(f"{who}; got {type(name).__name__} in it. {way_out}")
        self._checkpoints = tuple(checkpoints)

    set_checkpoints = _set_checkpoints

    def _boundaries(self, who: str) -> Sequence[str]:
        if self._checkpoints is None:
            raise ValueError(
                f"{who}: You should call _set_checkpoints first, with the names of the marks to "
                "cut at; nothing is set. Write opt._set_checkpoints(['fc_1', 'pred'])."
            )
        return self._checkpoints

    def load(self, state: Any) -> NoReturn:
        """Not supported, as in the seed: there is no state in the object.

        Args:
            state: What was saved.

        Raises:
            NotImplementedError: Always.
        """
        path = isinstance(state, str | os.PathLike)
        raise NotImplementedError(
            "jrc.compat.RecomputeOptimizer.load: load function is not supported by Recompute "
            f"Optimizer for now: the optimizer's state goes in and comes out; got {state!r}. Write "
            f"opt_state = jrc.restore({state if path else 'path'!r}, opt.init(params))."
        )
