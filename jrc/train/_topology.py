"""Meshes that follow the hardware: slices and hosts outside, links between neighbours inside."""

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh


def mesh_over_all(axis_name: str) -> Mesh:
    """Return one automatic axis over all devices of all processes, neighbours beside each other.

    With several slices, whose network is slow, the devices of a slice lie one after another.
    """
    devices = jax.devices()
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) == 1:
        return jax.make_mesh((len(devices),), (axis_name,), axis_types=(AxisType.Auto,))
    shape = (len(devices) // len(slices),)
    order = mesh_utils.create_hybrid_device_mesh(shape, (len(slices),), devices)
    return Mesh(np.asarray(order), (axis_name,))
