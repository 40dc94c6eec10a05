"""A training state of shapes: what a step needs is planned and compiled from it, and nothing runs.

It is made where parameters are shapes, or the mesh is one of devices that are not there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._targets import is_compile_only
from jrc._tree import is_typed_key
from jrc._typing import PyTree


def is_abstract(tree: PyTree, mesh: Mesh) -> bool:
    """Return whether a state with these leaves on this mesh can have no arrays."""
    shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
    return shapes or is_compile_only(mesh.devices.flat[0])


def abstract_state(
    state: PyTree, specs: PyTree, row_specs: PyTree, mesh: Mesh, replicas: int
) -> PyTree:
    """Return the shapes of a state, with shardings over the mesh.

    Args:
        state: The state of one replica: arrays or shapes.
        specs: How each leaf is split.
        row_specs: For each leaf an empty spec, or one that names an axis if it has a row for each
            replica.
        mesh: The mesh.
        replicas: The number of replicas.
    """

    def placed(x: Any, spec: PartitionSpec, row: PartitionSpec) -> jax.ShapeDtypeStruct:
        shape = (replicas, *x.shape[1:]) if row != PartitionSpec() else jnp.shape(x)
        dtype = x.dtype if is_typed_key(x) else jnp.result_type(x)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, state, specs, row_specs)
