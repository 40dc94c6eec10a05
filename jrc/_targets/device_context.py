"""The device that a kernel finds when it asks what it is compiled for.

Pallas kernels ask while they are traced and lowered: Triton for the compute capability, some TPU
kernels for the sizes of the chip's memories. Without a mesh they look at JAX's first device.
"""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from jrc._targets.accelerator import Target


@contextlib.contextmanager
def target_device_context(to: Target | None) -> Iterator[None]:
    """Let kernels find the device of a target.

    A mesh that is set already stays, with its devices. Without a target nothing changes.
    """
    if to is None or not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    device = to.devices[0]
    cores = {"tpu": "num_cores", "gpu": "core_count"}.get(device.platform, "")
    found = AbstractDevice(device.device_kind, getattr(device, cores, None), device.platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=found)):
        yield
