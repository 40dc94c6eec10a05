"""Where a replica's own arrays are split: the mesh axes besides the replica axis.

Compression is local: each device chooses among the entries of its own shard, and sends them to the
devices with the same shard of the other replicas. Axes over which XLA splits arrays (automatic
ones, and explicit ones) are made manual around the step, so that nothing is gathered.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jrc._errors import listed
from jrc._layout import check_whole
from jrc._mesh_axes import is_tracked
from jrc._specs import axes_of, is_spec, number_of_shards, restricted, trimmed
from jrc._tree import tree_difference, varying_axes
from jrc._typing import PyTree
from jrc.dgc._config import DGCConfig
from jrc.dgc._exchanges import Sharded
from jrc.dgc._leaves import Leaf, Trees
from jrc.dgc._state import is_placeholder


class Shards(NamedTuple):
    """The mesh axes over which a replica itself is split.

    Attributes:
        free: Axes that are not manual yet; empty if arrays are local already.
        unknown: Manual axes of which it is not known whether leaves are split over them.
        mesh: The mesh of the free axes.
    """

    free: frozenset[str]
    unknown: tuple[str, ...]
    mesh: Any

    def parts(self, leaf: Leaf) -> int:
        """Return the number of shards of a leaf that is not local yet."""
        return number_of_shards(leaf.spec, self.mesh.shape) if self.free else 1


def shards_of(
    trees: Trees, leaves: list[Leaf], param_specs: PyTree, config: DGCConfig
) -> tuple[Shards, list[Leaf]]:
    """Return the axes over which a replica is split, and its leaves with their specs and axes.

    They are known from `param_specs`, from types with explicit axes, and from varying types.

    Args:
        trees: The trees of the step.
        leaves: Its floating leaves.
        param_specs: A `PartitionSpec` for each parameter or one for all, `None` if not given.
        config: The arguments of `scale_by_dgc`.

    Raises:
        ValueError: If parameters are split over the replica axis, if there are automatic axes and
            no `param_specs`, or if leaves that are equal on several devices might be sent
            differently by them.
    """
    own = {config.axis, config.inner_axis}
    mesh = _mesh_of(leaves)
    sizes = dict(mesh.shape)
    free = {name for name in (*mesh.auto_axes, *mesh.explicit_axes) if sizes[name] > 1}
    given = _given(trees, param_specs)
    if given is None and config.axis is not None and free & set(mesh.auto_axes) and leaves:
        raise ValueError(
            "param_specs must be given where mesh axes besides axis_name are automatic, "
            f"got None and {listed(sorted(free & set(mesh.auto_axes)))}. Pass the PartitionSpecs "
            "of the parameters, or PartitionSpec() if they are whole on each device."
        )
    if param_specs is not None and config.axis is not None:
        rule = f"of the compressed axis {config.axis!r}"
        check_whole(param_specs, (config.axis,), "params", rule)
    placed = []
    for leaf in leaves:
        whole = _typed(leaf) if given is None else given[leaf.place]
        spec = restricted(whole, free)
        split = axes_of(spec if given is None else whole)
        axes = (frozenset(split) | varying_axes(leaf.gradient)) - own
        placed.append(dataclasses.replace(leaf, spec=spec, axes=axes))
    unknown = tuple(
        name
        for name in mesh.manual_axes
        if given is None and name not in own and sizes[name] > 1 and not is_tracked(name)
    )
    _check_choice(unknown, config)
    if config.axis is None and not any(leaf.spec for leaf in placed):
        free = set()
    return Shards(frozenset(free), unknown, mesh), placed


def on_shards(
    fn: Callable[..., Any], shards: Shards, in_specs: Any, out_specs: Any, axis: str | None
) -> Callable[..., Any]:
    """Return `fn` so that it gets the shards of this device, and its results joined again.

    Args:
        fn: A function of local arrays, with collectives over `axis`.
        shards: The axes that are not manual yet.
        in_specs: As for `jax.shard_map`, over these axes.
        out_specs: Likewise.
        axis: The replica axis.

    Returns:
        The function; `fn` itself where arrays are local already.
    """
    if not shards.free:
        return fn
    tracked = axis is not None and is_tracked(axis)
    nested = bool(jax.sharding.get_abstract_mesh().axis_names)
    return jax.shard_map(
        fn,
        mesh=None if nested else shards.mesh,
        axis_names=set(shards.mesh.axis_names) - set(shards.mesh.manual_axes),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=tracked,
    )


def as_split(leaf: Leaf, mesh: Any) -> Leaf:
    """Return a leaf with its gradient split as its state is, over explicit axes."""
    explicit = restricted(leaf.spec, mesh.explicit_axes)
    now = trimmed(jax.typeof(leaf.gradient).sharding.spec)
    if not mesh.explicit_axes or restricted(now, mesh.explicit_axes) == explicit:
        return leaf
    sharding = NamedSharding(mesh, explicit)
    return dataclasses.replace(leaf, gradient=jax.sharding.reshard(leaf.gradient, sharding))


def _check_choice(unknown: tuple[str, ...], config: DGCConfig) -> None:
    """Raise if leaves that are equal on several devices might be sent differently by them."""
    choices = {
        "local_grad_clip_norm": config.local_grad_clip_norm is not None,
        f"selector={config.selector!r}": not getattr(config.selector, "by_leaf", True),
        "exchange='sharded'": isinstance(config.exchange, Sharded),
    }
    for what, together in choices.items():
        if unknown and together:
            raise ValueError(
                f"param_specs must be given for {what} where other mesh axes are manual, "
                f"got None and {listed(unknown)}. Pass the PartitionSpecs of the parameters, or "
                "check_vma=True to jax.shard_map."
            )


def _mesh_of(leaves: list[Leaf]) -> Any:
    """Return the mesh of the trace, or that of arrays with explicit axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        return mesh
    for leaf in leaves:
        found = jax.typeof(leaf.gradient).sharding.mesh
        if found.axis_names:
            concrete = getattr(getattr(leaf.gradient, "sharding", None), "mesh", None)
            return found if isinstance(leaf.gradient, jax.core.Tracer) else concrete
    return mesh


def _given(trees: Trees, param_specs: PyTree) -> list[PartitionSpec] | None:
    """Return a spec for each leaf of the gradients."""
    if param_specs is None:
        return None
    if isinstance(param_specs, PartitionSpec):
        return [param_specs] * len(trees.gradients)
    try:
        parts = trees.treedef.flatten_up_to(
            jax.tree.map(lambda s: s or PartitionSpec(), param_specs, is_leaf=is_spec)
        )
    except ValueError as error:
        whole = trees.treedef.unflatten(trees.gradients)
        difference = tree_difference(whole, param_specs, lambda x: is_spec(x) or is_placeholder(x))
        raise ValueError(
            "param_specs must have the structure of the parameters, got another: "
            f"{difference}. Pass a PartitionSpec for each parameter, or one for all."
        ) from error
    # Where whole subtrees are masked out there is a tree of specs, which is not used.
    return [part if isinstance(part, PartitionSpec) else PartitionSpec() for part in parts]


def _typed(leaf: Leaf) -> PartitionSpec:
    """Return how types say that the state of a leaf is split."""
    if leaf.compressed:
        return PartitionSpec(*jax.typeof(leaf.v).sharding.spec[1:])
    return jax.typeof(leaf.velocity).sharding.spec
