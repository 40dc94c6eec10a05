"""Words to whoever looks at a function: what a transform finds without effect while it traces.

>>> with heard() as words:
...     notice("nothing matches 'tanh'.")
>>> words
["nothing matches 'tanh'."]
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LISTENER: ContextVar[list[str] | None] = ContextVar("listener", default=None)


def emit_notice(text: str) -> None:
    """Say something, if anybody listens."""
    words = _LISTENER.get()
    if words is not None and text not in words:
        words.append(text)


@contextmanager
def collected_notices() -> Iterator[list[str]]:
    """What is noticed while this is open."""
    words: list[str] = []
    token = _LISTENER.set(words)
    try:
        yield words
    finally:
        _LISTENER.reset(token)
