"""Checks of an outer optimizer, and of the inner one."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrc._errors import listed
from jrc._specs import axes_of
from jrc._tree import named_leaves
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


def check_whole_replicas(specs: PyTree, who: str) -> None:
    """Raise if a parameter is split: each replica of an outer optimizer is one device."""
    axes = {axis for spec in jax.tree.leaves(specs) for axis in axes_of(spec)}
    if axes:
        _raise_split(axes, who)


def check_axes(mesh: Mesh, names: tuple[str, ...], who: str) -> None:
    """Raise if the mesh has axes besides those of the replicas."""
    axes = {axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in names}
    if axes:
        _raise_split(axes, who)


def _raise_split(axes: set[str], who: str) -> None:
    raise ValueError(
        f"{who}: with outer= every replica must be one device with whole parameters, got a split "
        f"over {listed(sorted(axes))}. Use a mesh with the axes of axis_name alone, or compress "
        "over one axis of this mesh with jrc.scale_by_dgc."
    )
