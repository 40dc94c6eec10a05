"""A progress line in the terminal, which shows the records of the logger `jrc`."""

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
    """Show `first`, then each record of the logger `jrc`, if stderr is a terminal."""
    logger = logging.getLogger("jrc")
    # With a level of INFO the user gets these records from the logger.
    if not sys.stderr.isatty() or logger.isEnabledFor(logging.INFO):
        yield
        return
    console, spinner = Console(stderr=True), Spinner("dots", Text(first))
    handler = _Lines(
        lambda text: spinner.update(text=Text(text)), lambda text: console.print(Text(text))
    )
    before = logger.level, logger.propagate
    # The program's own output is not redirected.
    unchanged = {"redirect_stdout": False, "redirect_stderr": False}
    with Live(spinner, console=console, transient=True, **unchanged):
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
    """Pass each record's text to `show`, or to `keep` for warnings, which stay on the screen."""

    def __init__(self, show: Callable[[str], None], keep: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.show, self.keep = show, keep

    def emit(self, record: logging.LogRecord) -> None:
        write = self.show if record.levelno < logging.WARNING else self.keep
        write(record.getMessage())
