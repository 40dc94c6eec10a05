"""List the values that a gradient saves in the forward pass."""

import dataclasses
import math
from collections.abc import Iterable
from fractions import Fraction

import jax

from jrc._jaxpr import Origin, Scope, is_variable, origin_of, primitive_name
from jrc.remat._gradient.compiled_memory import compiled_to_look_at, memory_of_refused
from jrc.remat._gradient.loss import Loss

_WHOLE = Fraction(1)


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """One value that is saved for the backward pass.

    Attributes:
        bytes: Its bytes on one device, those of all loop steps together.
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
    the program of `loss` once more; Python does not call the user's function. Where `jit` shards
    arguments over several devices, the forward pass is compiled for the shardings of what it saves.
    """
    jaxpr = jax.make_jaxpr(loss.residuals)(loss.perturbed, loss.rest)
    scope, parts = Scope(jaxpr), _parts(loss) or [_WHOLE] * len(jaxpr.outvars)
    found: dict[object, tuple[Origin, str, Fraction]] = {}
    position = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    saved = {var: part for var, part in zip(jaxpr.outvars, parts, strict=True) if is_variable(var)}
    for var in sorted(saved, key=lambda var: position.get(scope.unviewed(var), -1)):
        origin = origin_of(scope, var)
        if origin.eqn is not None:
            found.setdefault(origin.key, (origin, _memory(var), saved[var]))
    return tuple(_saved_value(*each) for each in found.values())


def _parts(loss: Loss) -> list[Fraction]:
    """Return the share of each residual that lies on one device; nothing if all is on one."""
    if not loss.is_sharded:
        return []
    platform = loss.device.platform
    lowered = jax.jit(loss.residuals).lower(loss.perturbed, loss.rest)
    try:
        compiled = compiled_to_look_at(lowered, platform)
    except jax.errors.JaxRuntimeError as error:
        memory_of_refused(error)  # raises what is not about memory
        return []
    shapes = jax.tree.leaves(lowered.out_info)
    shardings = jax.tree.leaves(compiled.output_shardings)
    return [_part(x.shape, each) for x, each in zip(shapes, shardings, strict=True)]


def _part(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Fraction:
    whole = math.prod(shape)
    return Fraction(math.prod(sharding.shard_shape(shape)), whole) if whole else _WHOLE


def total_bytes(values: Iterable[SavedValue]) -> int:
    """Return the bytes of the values that are saved on the device."""
    return sum(value.bytes for value in values if value.memory == "device")


def _memory(var: object) -> str:
    """Return the memory kind of a variable; JAX calls pinned host memory `Host` in its type."""
    space = getattr(getattr(var, "aval", None), "memory_space", None)
    name = str(getattr(space, "name", space or "device")).lower()
    return "pinned_host" if name == "host" else name


def _saved_value(origin: Origin, memory: str, part: Fraction) -> SavedValue:
    return SavedValue(
        bytes=int(origin.bytes * part),
        shape=tuple(int(n) for n in getattr(origin.aval, "shape", ())),
        dtype=str(getattr(origin.aval, "dtype", "")),
        primitive=primitive_name(origin.eqn) if origin.eqn is not None else "",
        mark=origin.mark,
        place=origin.place,
        times=origin.times,
        origin=origin.constructs,
        memory=memory,
    )
