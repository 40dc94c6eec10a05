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

# Bytes of an error's text that the other processes get.
_TEXT_BYTES = 1000


class FailedElsewhere(RuntimeError):
    """Another process of the run has failed."""


def all_or_none[T](do: Callable[[], T], who: str) -> T:
    """Call a function on every process, and raise on all of them if it fails on one.

    Without this, the other processes would wait in the next collective for the one that failed.

    Args:
        do: A function without collectives.
        who: The public function, for errors.

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
        of_all(True)
        multihost_utils.process_allgather(_as_bytes(error))
        raise
    if np.any(failed := of_all(False)):
        texts = multihost_utils.process_allgather(_as_bytes(None))
        first = int(np.argmax(failed))
        text = bytes(texts[first]).rstrip(b"\0").decode(errors="replace")
        raise FailedElsewhere(f"{who}: process {first} failed, and so all stop. {text}")
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
