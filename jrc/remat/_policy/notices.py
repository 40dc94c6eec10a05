"""Notices: what a transform finds to be without effect while it traces, for `jrc.explain`.

>>> with collected_notices() as notices:
...     emit_notice("nothing matches 'tanh'.")
...     emit_notice("nothing matches 'sin'.")
...     withdraw_notice("nothing matches 'sin'.")
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


def withdraw_notice(text: str) -> None:
    """Remove a notice that turned out to be untrue."""
    notices = _COLLECTED.get()
    if notices is not None and text in notices:
        notices.remove(text)


@contextmanager
def collected_notices() -> Iterator[list[str]]:
    """Collect the notices that are emitted while this context is open."""
    notices: list[str] = []
    token = _COLLECTED.set(notices)
    try:
        yield notices
    finally:
        _COLLECTED.reset(token)


def keep_tag_notice(operator: str) -> str:
    """Return the notice about a tag of `jrc.keep_op` that no transform acts on."""
    return (
        f"jrc.keep_op({operator}) has no effect: a value is saved by the region that would "
        "recompute it, and no jrc transform is around the call. Call it inside jrc.recompute, "
        "jrc.recompute_segments or jrc.apply_rules, or remove the tag."
    )
