"""What a gradient keeps from the forward pass, value by value."""

import dataclasses
from collections.abc import Iterable

import jax

from jrc._jaxpr import Origin, Scope, is_variable, origin_of, primitive_name
from jrc.remat._gradient.loss import Loss


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """One value that is kept for the backward pass.

    Attributes:
        bytes: Of all of it together; inside `shard_map` on one device.
        shape: Shape, in a loop that of one step.
        dtype: Name of the type of its entries.
        primitive: The operator that makes it.
        mark: Its name, if it was marked.
        place: The source line, `net.py:31`.
        times: How many of it are kept: the length of the loops around it.
        origin: The constructs inside of which it is made, outermost first.
        memory: Where it is kept: `"device"`, or the memory that it was offloaded to.
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
    """What the derivative keeps besides what it is given, in the order of the program.

    A value that is kept under several names, or in several shapes, counts once. What the function
    is given, or closes over, is there anyway.
    """
    jaxpr = jax.make_jaxpr(loss.pullback)(loss.perturbed, loss.rest)
    scope = Scope(jaxpr)
    found: dict[object, tuple[Origin, str]] = {}
    position = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    kept = dict.fromkeys(filter(is_variable, jaxpr.outvars))
    for var in sorted(kept, key=lambda var: position.get(scope.unviewed(var), -1)):
        origin = origin_of(scope, var)
        if origin.eqn is not None:
            found.setdefault(origin.key, (origin, _memory(var)))
    return tuple(_described(origin, memory) for origin, memory in found.values())


def total_bytes(values: Iterable[SavedValue]) -> int:
    """Bytes of those that are kept on the device."""
    return sum(value.bytes for value in values if value.memory == "device")


def _memory(var: object) -> str:
    space = getattr(getattr(var, "aval", None), "memory_space", None)
    name = str(getattr(space, "name", space or "device")).lower()
    return "pinned_host" if name == "host" else name


def _described(origin: Origin, memory: str) -> SavedValue:
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
