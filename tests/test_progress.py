"""The progress line, in a pseudo-terminal and without a terminal."""

import logging
import os
import subprocess
import sys

import pytest

from jrc._progress import shown_meanwhile

pty = pytest.importorskip("pty")  # Windows has none

# A handler of the root logger, as many libraries leave one behind.
PROGRAM = """
import logging, time
logging.basicConfig(level=logging.WARNING, format="ROOT %(message)s")
from jrc._progress import shown_meanwhile
logger = logging.getLogger("jrc")
with shown_meanwhile("tracing"):
    time.sleep(0.3)
    for line in ("compiling [f32] 1", "compiling 2"):
        logger.info(line)
        time.sleep(0.3)
    logger.warning("no effect")
    print("of the function")
logger.info("silent again")
logger.warning("as ever")
"""


def seen():
    """The program's output in a terminal, and its stdout."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=theirs, env=environment,
        timeout=120, check=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    # On Linux the end of a pseudo-terminal is an OSError.
    try:
        while more := os.read(ours, 4096):
            shown += more
    except OSError:
        pass
    os.close(ours)
    return shown.decode(), run.stdout.decode()


def test_a_terminal_shows_the_records_in_one_line():
    shown, printed = seen()
    assert printed == "of the function\n"
    for text in ("tracing", "compiling [f32] 1", "compiling 2"):
        assert text in shown
    # A warning stays, once; the root logger gets neither it nor the records.
    assert shown.count("no effect") == 1 and shown.count("ROOT") == 1
    assert shown.rstrip().endswith("ROOT as ever") and "silent" not in shown


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_is_shown_without_a_terminal(asked, capsys, caplog, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    logger = logging.getLogger("jrc")
    if asked:  # for the records, at a terminal
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        caplog.set_level(logging.INFO, logger="jrc")
    before = logger.level, logger.propagate, list(logger.handlers)
    with shown_meanwhile("tracing"):
        logger.info("compiling")
    assert (logger.level, logger.propagate, logger.handlers) == before
    assert capsys.readouterr().err == ""
    assert [record.message for record in caplog.records] == ["compiling"] * asked
