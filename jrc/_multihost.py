"""Agreement between the processes of one run: on errors, and on equal values.

With one process these functions do not communicate. With several, every process calls them in the
same order.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jrc._errors import name_error
from jrc._optional import needed

# Bytes of an error's text that the other processes get.
_TEXT_BYTES = 1000


class FailedElsewhere(RuntimeError):
    """Another process of the run has failed."""


def all_or_none[T](do: Callable[[], T]) -> T:
    """Call a function on every process, and raise on all of them if it fails on one.

    Without this, the other processes would wait in the next collective for the one that failed.

    Args:
        do: A function without collectives.

    Returns:
        The result of `do` on this process.

    Raises:
        Exception: The exception of `do` on this process.
        FailedElsewhere: If `do` failed on other processes only, with the text of the first.
    """
    if jax.process_count() == 1:
        return do()
    try:
        out = do()
    except Exception as error:
        name_error(error)  # the other processes get the whole text
        of_all(True)
        multihost_utils.process_allgather(_as_bytes(error))
        raise
    if np.any(failed := of_all(False)):
        texts = multihost_utils.process_allgather(_as_bytes(None))
        first = int(np.argmax(failed))
        text = bytes(texts[first]).rstrip(b"\0").decode(errors="replace")
        raise FailedElsewhere(f"process {first} failed, and so all stop. {text}")
    return out


def of_all(number: int) -> np.ndarray:
    """Gather a number from every process, `int32[processes]`."""
    return np.ravel(multihost_utils.process_allgather(np.int32(number)))


def differing(named: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the names of the arrays that differ between processes.

    Args:
        named: Names and arrays. Shapes and dtypes are compared, and the bytes of arrays that lie
            on this process only.

    Returns:
        The names in their order, equal on every process; one text in their place if names, shapes
        or dtypes differ.
    """
    if jax.process_count() == 1:
        return []
    kinds = [(name, np.shape(x), str(jnp.result_type(x))) for name, x in named]
    sums = [_checksum(repr(kinds).encode()), *(_checksum(_bytes_of(x)) for _, x in named)]
    # A single number first: lists of different lengths cannot be gathered.
    if len(set(of_all(sums[0]))) > 1:
        return ["(names, shapes or dtypes)"]
    every = multihost_utils.process_allgather(np.asarray(sums[1:], np.int32))
    return [name for (name, _), row in zip(named, every.T, strict=True) if len(set(row)) > 1]


def differing_copies(named: Sequence[tuple[str, Any]]) -> list[tuple[str, list[int]]]:
    """Return the arrays of which processes hold unequal copies of one part.

    Args:
        named: Names and arrays, those that lie on several processes among them; the same names,
            shapes and shardings on every process.

    Returns:
        Names, and the processes that hold copies of the first part that differs.
    """
    if jax.process_count() == 1:
        return []
    spread = [(name, x) for name, x in named if _is_spread(x)]
    owners = [(name, _owners(x)) for name, x in spread]
    # Where processes pass arrays of other kinds there is nothing to compare.
    if len(set(of_all(_checksum(repr(owners).encode())))) > 1 or not owners:
        return []
    sums = [crc for _, x in spread for crc in _sums_of_parts(x)]
    every = multihost_utils.process_allgather(np.asarray(sums, np.int32))
    found: dict[str, list[int]] = {}
    parts_of = ((name, who) for name, parts in owners for who in parts.values())
    for (name, who), row in zip(parts_of, every.reshape(len(every), -1).T, strict=True):
        if len({int(row[process]) for process in who}) > 1:
            found.setdefault(name, who)
    return list(found.items())


def reached_by_all(point: str, seconds: float) -> bool:
    """Return whether every process comes to a point within a time; devices take no part.

    Args:
        point: A name for it, used once.
        seconds: How long to wait.

    Returns:
        Whether all did; true also where processes have no service to ask.
    """
    if jax.process_count() == 1:
        return True
    multihost = needed("orbax.checkpoint").multihost
    try:
        wait = multihost.get_barrier_sync_fn()
    except ValueError:  # started without jax.distributed.initialize
        return True
    try:
        wait(key=point, timeout_ms=int(1000 * seconds))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _is_spread(x: Any) -> bool:
    """Whether several processes hold copies of one part of an array."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return False
    return any(len(processes) > 1 for processes in _owners(x).values())


def _owners(x: jax.Array) -> dict[str, list[int]]:
    """Return which processes hold each part of an array."""
    found: dict[str, set[int]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        found.setdefault(str(index), set()).add(device.process_index)
    return {index: sorted(processes) for index, processes in found.items()}


def _sums_of_parts(x: jax.Array) -> list[int]:
    """Return a checksum of each part, in the order of `_owners`; 0 for those not here."""
    here = {str(shard.index): shard.data for shard in x.addressable_shards}
    return [_checksum(_bytes_of(here[i])) if i in here else 0 for i in _owners(x)]


def _checksum(data: Any) -> int:
    return int(np.uint32(zlib.crc32(data)).view(np.int32))


def _bytes_of(x: Any) -> Any:
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return b""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.ascontiguousarray(x).tobytes()


def _as_bytes(error: Exception | None) -> np.ndarray:
    text = b"" if error is None else f"{type(error).__name__}: {error}".encode()
    return np.frombuffer(text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.uint8)
