"""List the values that a gradient saves in the forward pass."""

import dataclasses
from collections.abc import Iterable

import jax

from jrc._jaxpr import Origin, Scope, is_variable, origin_of, primitive_name
from jrc.remat._gradient.loss import Loss


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """One value that is saved for the backward pass.

    Attributes:
        bytes: Its bytes, those of all loop steps together; inside `shard_map` on one device.
        shape: Its shape; in a loop that of one step.
        dtype: The name of its dtype.
        primitive: The operator that makes it.
        mark: The name of its mark, if it has one.
        place: The source line, `net.py:31`.
        times: How many of it are saved: the number of steps of the loops around it.
        origin: The constructs that it is made inside of, outermost first.
        memory: The memory that it is saved in: `"device"`, or where it was offloaded to.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    primitive: str
    mark: str | None
    place: str
    times: int
    origin: tuple[str, ...]
    memory: str = "device"


def saved_values(loss: Loss) -> tuple[SavedValue, ...]:
    """Return the values that the derivative saves, in program order.

    A value that is saved under several names, or in several shapes, counts once. Arguments of the
    function, and arrays that it closes over, do not count: they stay in memory anyway. JAX traces
    the program of `loss` once more; Python does not call the user's function.
    """
    jaxpr = jax.make_jaxpr(loss.residuals)(loss.perturbed, loss.rest)
    scope = Scope(jaxpr)
    found: dict[object, tuple[Origin, str]] = {}
    position = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    saved = dict.fromkeys(filter(is_variable, jaxpr.outvars))
    for var in sorted(saved, key=lambda var: position.get(scope.unviewed(var), -1)):
        origin = origin_of(scope, var)
        if origin.eqn is not None:
            found.setdefault(origin.key, (origin, _memory(var)))
    return tuple(_saved_value(origin, memory) for origin, memory in found.values())


def total_bytes(values: Iterable[SavedValue]) -> int:
    """Return the bytes of the values that are saved on the device."""
    return sum(value.bytes for value in values if value.memory == "device")


def _memory(var: object) -> str:
    """Return the memory kind of a variable; JAX calls pinned host memory `Host` in its type."""
    space = getattr(getattr(var, "aval", None), "memory_space", None)
    name = str(getattr(space, "name", space or "device")).lower()
    return "pinned_host" if name == "host" else name


def _saved_value(origin: Origin, memory: str) -> SavedValue:
    return SavedValue(
        bytes=origin.bytes,
        shape=tuple(int(n) for n in getattr(origin.aval, "shape", ())),
        dtype=str(getattr(origin.aval, "dtype", "")),
        primitive=primitive_name(origin.eqn) if origin.eqn is not None else "",
        mark=origin.mark,
        place=origin.place,
        times=origin.times,
        origin=origin.constructs,
        memory=memory,
    )
