"""What is logged while somebody waits, in one line of a terminal."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from rich.console import Console


@contextlib.contextmanager
def shown_meanwhile(first: str) -> Iterator[None]:
    """Show `first`, then each record of the logger `jrc`; nothing where nobody looks on."""
    console, logger = Console(stderr=True), logging.getLogger("jrc")
    if not console.is_terminal:
        yield
        return
    with console.status(first) as status:
        handler, level = _Lines(status.update), logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)


class _Lines(logging.Handler):
    """Each record to a function of one text."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())
