"""What is logged while somebody waits, in one line of a terminal."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text


@contextlib.contextmanager
def shown_meanwhile(first: str) -> Iterator[None]:
    """Show `first`, then each record of the logger `jrc`; nothing where nobody looks on."""
    logger = logging.getLogger("jrc")
    # Who asked for these records has them from the logger.
    if not sys.stderr.isatty() or logger.isEnabledFor(logging.INFO):
        yield
        return
    console, spinner = Console(stderr=True), Spinner("dots", Text(first))
    handler = _Lines(
        lambda text: spinner.update(text=Text(text)), lambda text: console.print(Text(text))
    )
    before = logger.level, logger.propagate
    # Whatever the program prints stays where it goes.
    still = {"redirect_stdout": False, "redirect_stderr": False}
    with Live(spinner, console=console, transient=True, **still):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.setLevel(before[0])
            logger.propagate = before[1]
            logger.removeHandler(handler)


class _Lines(logging.Handler):
    """Each record to a function of one text; warnings stay on the screen."""

    def __init__(self, show: Callable[[str], None], keep: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.show, self.keep = show, keep

    def emit(self, record: logging.LogRecord) -> None:
        to = self.show if record.levelno < logging.WARNING else self.keep
        to(record.getMessage())
