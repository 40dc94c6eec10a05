"""Notices: what a transform finds to be without effect while it traces, for `jrc.explain`.

>>> with collected_notices() as notices:
...     emit_notice("nothing matches 'tanh'.")
>>> notices
["nothing matches 'tanh'."]
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_COLLECTED: ContextVar[list[str] | None] = ContextVar("collected", default=None)


def emit_notice(text: str) -> None:
    """Add a notice to the list that is being collected, if there is one."""
    notices = _COLLECTED.get()
    if notices is not None and text not in notices:
        notices.append(text)


@contextmanager
def collected_notices() -> Iterator[list[str]]:
    """Collect the notices that are emitted while this context is open."""
    notices: list[str] = []
    token = _COLLECTED.set(notices)
    try:
        yield notices
    finally:
        _COLLECTED.reset(token)
