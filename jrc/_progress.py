"""A progress line in the terminal, which shows the records of the logger `jrc`."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

# An environment variable; "0" switches the line off.
SWITCH = "JRC_PROGRESS"


@contextlib.contextmanager
def shown_meanwhile(first: str) -> Iterator[None]:
    """Show `first`, then each record of the logger `jrc` below its level, in one line of stderr.

    Nothing is shown, and nothing changes, where stderr is no terminal, where the user gets these
    records from the logger, with `JRC_PROGRESS=0`, and on all processes of a run but the first. The
    line disappears at the end. Other records go their way; nothing more is written to any handler.
    """
    logger = logging.getLogger("jrc")
    # With a level of INFO the user gets these records, and a line that is shown has set it too.
    if not _is_terminal() or os.environ.get(SWITCH) == "0" or logger.isEnabledFor(logging.INFO):
        yield
        return
    if jax.process_index() != 0:
        yield
        return
    line = _Line(first, logger.getEffectiveLevel())
    before = logger.level
    logger.addFilter(line)
    logger.setLevel(logging.INFO)
    try:
        line.show()
        yield
    finally:
        logger.setLevel(before)
        logger.removeFilter(line)
        line.hide()


def _is_terminal() -> bool:
    """Whether stderr is a terminal; a notebook's and a window's without a console are not."""
    return sys.stderr is not None and sys.stderr.isatty()


class _Line(logging.Filter):
    """Show the text of records below a level in the line, and drop them; let the others pass."""

    def __init__(self, text: str, level: int) -> None:
        super().__init__()
        self.level = level
        self.spinner = Spinner("dots", _one_line(text))
        self.live: Live | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record goes to its handlers; the line is hidden before it."""
        if record.levelno >= self.level:
            self.hide()
            return True
        self.spinner.update(text=_one_line(record.getMessage()))
        self.show()
        return False

    def show(self) -> None:
        """Show the line, if it is not shown."""
        if self.live is None:
            # The program's own output is not redirected.
            unchanged = {"redirect_stdout": False, "redirect_stderr": False}
            console = Console(stderr=True)
            self.live = Live(self.spinner, console=console, transient=True, **unchanged)
            self.live.start()

    def hide(self) -> None:
        """Remove the line until the next record."""
        if self.live is not None:
            self.live.stop()
            self.live = None


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
