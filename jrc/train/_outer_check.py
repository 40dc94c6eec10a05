"""Checks of an outer optimizer, and of the inner one."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jrc._errors import listed
from jrc._specs import axes_of
from jrc._tree import named_leaves
from jrc._typing import PyTree
from jrc.dgc._internal import dgc_states
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


def check_real(params: PyTree, who: str) -> None:
    """Raise if a parameter is complex: differences are exchanged in float32."""
    for name, leaf in named_leaves(params):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise ValueError(
                f"{who}: params must be real with outer=, which exchanges float32, got "
                f"{jnp.result_type(leaf)} at {name!r}. Keep its real and its imaginary part as "
                "two arrays, and join them in the loss function."
            )


def check_via(via: str, mesh: Mesh, who: str) -> None:
    """Raise for a `jit` over several devices, in which there are no replicas."""
    if via == "jit" and mesh.size > 1:
        raise ValueError(
            f"{who}: via must be 'shard_map' or 'pmap' with outer= on several devices, got 'jit' "
            f"on {mesh.size}. Leave via= out."
        )


def check_whole_replicas(
    specs: PyTree, names: tuple[str, ...], who: str, what: str = "params"
) -> None:
    """Raise if an array is split over an axis of the step: each replica has whole ones."""
    for name, spec in named_leaves(specs):
        if over := sorted(set(axes_of(spec)) & set(names)):
            raise ValueError(
                f"{who}: {what} must be whole on every replica with outer=, whose replicas train "
                f"on their own, got {name or 'a leaf'!r} split over {listed(over)} by {spec}. "
                f"Split {what} inside of a replica, over another axis: jax.make_mesh((2, 4), "
                f"({names[0]!r}, 'fsdp')) and PartitionSpec('fsdp')."
            )
