"""What the processes of one run settle together: whether all go on, and whether all have the same.

With one process nothing is asked and nothing waits. With several, each of them calls these
functions, in the same order.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

# An error's text as the other processes get it.
_WORDS = 1000


class FailedElsewhere(RuntimeError):
    """Another process of the run has failed, and so all stop."""


def all_or_none[T](do: Callable[[], T], who: str) -> T:
    """Call on every process a function that waits for nobody; where one fails, all fail.

    Without this the others would wait for the one that failed.

    Args:
        do: What each process does.
        who: The name under which errors speak.

    Returns:
        What `do` returned here.

    Raises:
        Exception: What `do` raised here.
        FailedElsewhere: If it failed on other processes alone, with the text of the first of them.
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
    """This number of every process, `int32[processes]`; the number itself of one process."""
    return np.ravel(multihost_utils.process_allgather(np.int32(number)))


def differing(named: Sequence[tuple[str, Any]]) -> list[str]:
    """Names of the arrays that are not the same on every process.

    Args:
        named: Names and arrays. Of one that lies on several processes, or is traced, the shape and
            dtype are compared, of any other the bytes too.

    Returns:
        The names in their order, the same on every process; a sentence in their place where not
        even names, shapes and dtypes agree.
    """
    if jax.process_count() == 1:
        return []
    kinds = [(name, np.shape(x), str(jnp.result_type(x))) for name, x in named]
    sums = [_checksum(repr(kinds).encode()), *(_checksum(_bytes_of(x)) for _, x in named)]
    # First a number alone: lists of different lengths cannot be gathered.
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
    return np.frombuffer(text[:_WORDS].ljust(_WORDS, b"\0"), np.uint8)
