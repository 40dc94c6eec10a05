"""Checks of an outer optimizer, and of the inner one."""

from typing import Any

from jrc._typing import PyTree
from jrc.dgc import dgc_states
from jrc.outer_optimizers import OuterOptimizer


def check_outer(outer: Any, who: str) -> None:
    """Raise unless this is `None` or an outer optimizer."""
    if outer is None or (isinstance(outer, OuterOptimizer) and not isinstance(outer, type)):
        return
    raise TypeError(
        f"{who}: outer must be None or an outer optimizer, got {outer!r}. Write "
        "outer=jrc.SparseLoCo(sync_every=30)."
    )


def check_inner(opt_state: PyTree, who: str) -> None:
    """Raise if the inner optimizer has a compression, which exchanges in each step."""
    if dgc_states(opt_state):
        raise ValueError(
            f"{who}: tx must not compress gradients beside outer=, whose inner steps exchange "
            "nothing, got one with jrc.scale_by_dgc. Pass a plain optimizer, such as "
            "optax.adamw(1e-3), or leave outer= out."
        )
