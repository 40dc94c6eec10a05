"""Where a replica's own arrays are split: the mesh axes besides the replica axis.

Compression is local: each device chooses among the entries of its own shard, and sends them to the
devices with the same shard of the other replicas. Axes over which XLA splits arrays (automatic
ones, and explicit ones) are made manual around the step, so that nothing is gathered.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jrc._errors import listed
from jrc._specs import axes_of, is_spec, number_of_shards, restricted, trimmed
from jrc._tree import tree_difference
from jrc._typing import PyTree
from jrc.dgc._collectives import is_tracked
from jrc.dgc._config import DGCConfig
from jrc.dgc._leaves import Leaves, pick
from jrc.dgc._state import check_whole, is_placeholder

_WHO = "jrc.scale_by_dgc"


class Shards(NamedTuple):
    """How the leaves of a step are split besides the replica axis.

    Attributes:
        specs: For each leaf how it is split over axes that are not manual yet.
        axes: For each leaf all axes along which its shards differ, manual ones included.
        free: Axes that are not manual yet; empty if arrays are local already.
        unknown: Manual axes of which it is not known whether leaves are split over them.
        mesh: The mesh of the free axes.
    """

    specs: list[PartitionSpec]
    axes: list[frozenset[str]]
    free: frozenset[str]
    unknown: tuple[str, ...]
    mesh: Any

    def specs_of(self, leaves: Leaves) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """Return the specs of the compressed leaves, and of those on the dense path."""
        return pick(self.specs, leaves.compressed), pick(self.specs, leaves.dense)

    def parts(self, place: int) -> int:
        """Return the number of shards of a leaf that is not local yet."""
        return number_of_shards(self.specs[place], self.mesh.shape) if self.free else 1


def shards_of(leaves: Leaves, param_specs: PyTree, config: DGCConfig) -> Shards:
    """Return how the leaves of a step are split.

    Args:
        leaves: The leaves of the step.
        param_specs: A `PartitionSpec` for each parameter or one for all, `None` if not given.
        config: The arguments of `scale_by_dgc`.

    Returns:
        Specs and axes, from `param_specs`, from types with explicit axes, and from varying types.

    Raises:
        ValueError: If parameters are split over the replica axis, or if there are automatic axes
            and no `param_specs`.
    """
    own = {config.axis, config.inner_axis}
    mesh = _mesh_of(leaves)
    sizes = dict(mesh.shape)
    free = {name for name in (*mesh.auto_axes, *mesh.explicit_axes) if sizes[name] > 1}
    given = _given(leaves, param_specs)
    if given is None and config.axis is not None and free & set(mesh.auto_axes) and leaves.floating:
        raise ValueError(
            f"{_WHO}: param_specs must be given where mesh axes besides axis_name are automatic, "
            f"got None and {listed(sorted(free & set(mesh.auto_axes)))}. Pass the PartitionSpecs "
            "of the parameters, or PartitionSpec() if they are whole on each device."
        )
    if param_specs is not None and config.axis is not None:
        check_whole(param_specs, config.axis, _WHO)
    seen = [_typed(leaves, place, free) for place in range(len(leaves.gradients))]
    specs = seen if given is None else [restricted(spec, free) for spec in given]
    axes = [frozenset(axes_of(spec)) for spec in (specs if given is None else given)]
    axes = [
        (known | _varying(gradient)) - own
        for known, gradient in zip(axes, leaves.gradients, strict=True)
    ]
    unknown = [
        name
        for name in mesh.manual_axes
        if given is None and name not in own and sizes[name] > 1 and not is_tracked(name)
    ]
    if config.axis is None and not any(specs[place] for place in leaves.floating):
        free = set()
    return Shards(specs, axes, frozenset(free), tuple(unknown), mesh)


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


def as_split(arrays: Sequence[Any], specs: Sequence[PartitionSpec], mesh: Any) -> list[Any]:
    """Return arrays with the specs of their state, where explicit axes split them otherwise."""

    def placed(x: Any, spec: PartitionSpec) -> Any:
        explicit = restricted(spec, mesh.explicit_axes)
        now = trimmed(jax.typeof(x).sharding.spec)
        same = not mesh.explicit_axes or restricted(now, mesh.explicit_axes) == explicit
        return x if same else jax.sharding.reshard(x, NamedSharding(mesh, explicit))

    return [placed(x, spec) for x, spec in zip(arrays, specs, strict=True)]


def check_known(shards: Shards, what: str) -> None:
    """Raise if a choice that all shards of a leaf make together needs axes that are not known."""
    if shards.unknown:
        raise ValueError(
            f"{_WHO}: param_specs must be given for {what} where other mesh axes are manual, got "
            f"None and {listed(shards.unknown)}. Pass the PartitionSpecs of the parameters, or "
            "check_vma=True to jax.shard_map."
        )


def _mesh_of(leaves: Leaves) -> Any:
    """Return the mesh of the trace, or that of arrays with explicit axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        return mesh
    for place in leaves.floating:
        gradient = leaves.gradients[place]
        found = jax.typeof(gradient).sharding.mesh
        if found.axis_names:
            concrete = getattr(getattr(gradient, "sharding", None), "mesh", None)
            return found if isinstance(gradient, jax.core.Tracer) else concrete
    return mesh


def _given(leaves: Leaves, param_specs: PyTree) -> list[PartitionSpec] | None:
    """Return a spec for each leaf of the gradients."""
    if param_specs is None:
        return None
    if isinstance(param_specs, PartitionSpec):
        return [param_specs] * len(leaves.gradients)
    try:
        parts = leaves.treedef.flatten_up_to(
            jax.tree.map(lambda s: s or PartitionSpec(), param_specs, is_leaf=is_spec)
        )
    except ValueError as error:
        whole = leaves.treedef.unflatten(leaves.gradients)
        difference = tree_difference(whole, param_specs, lambda x: is_spec(x) or is_placeholder(x))
        raise ValueError(
            f"{_WHO}: param_specs must have the structure of the parameters, got another: "
            f"{difference}. Pass a PartitionSpec for each parameter, or one for all."
        ) from error
    # Where whole subtrees are masked out there is a tree of specs, which is not used.
    return [part if isinstance(part, PartitionSpec) else PartitionSpec() for part in parts]


def _typed(leaves: Leaves, place: int, free: set[str]) -> PartitionSpec:
    """Return how types say that the state of a leaf is split, over explicit axes."""
    if place in leaves.compressed:
        return restricted(PartitionSpec(*jax.typeof(leaves.v[place]).sharding.spec[1:]), free)
    if place in leaves.dense:
        return restricted(jax.typeof(leaves.velocity[place]).sharding.spec, free)
    return PartitionSpec()


def _varying(gradient: Any) -> frozenset[str]:
    if not isinstance(gradient, jax.core.Tracer):
        return frozenset()
    return frozenset(jax.typeof(gradient).mat.varying)
