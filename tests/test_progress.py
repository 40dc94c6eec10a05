"""The progress line, in a pseudo-terminal and without a terminal."""

import logging
import os
import subprocess
import sys

import pytest

from jrc._progress import shown_meanwhile

pty = pytest.importorskip("pty")  # Windows has none

# A handler of the root logger, as many libraries leave one behind, and a log file of jrc's own.
PROGRAM = """
import logging, sys, time
logging.basicConfig(level=logging.WARNING, format="ROOT %(message)s")
logging.getLogger("jrc").addHandler(logging.FileHandler(sys.argv[1]))
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


PLAN = """
import jax, jax.numpy as jnp, jrc
loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
found = jrc.plan(loss, jnp.ones((4, 4)), jnp.ones(4), budget=10**9)
print(found.reruns)
"""


def seen(program, *arguments, **more):
    """A program's output in a terminal, and its stdout."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"} | more
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=theirs,
        env=environment, timeout=120, check=True,
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


@pytest.mark.slow
def test_a_terminal_shows_the_records_in_one_line(tmp_path):
    shown, printed = seen(PROGRAM, str(tmp_path / "log"))
    assert printed == "of the function\n"
    for text in ("tracing", "compiling [f32] 1", "compiling 2"):
        assert text in shown
    # A warning goes its way, on a line of its own; the handlers get it and no record below it.
    assert shown.count("ROOT no effect\r\n") == 1 and shown.count("ROOT") == 2
    assert (tmp_path / "log").read_text() == "no effect\nas ever\n"
    assert shown.rstrip().endswith("ROOT as ever") and "silent" not in shown


@pytest.mark.slow
def test_a_plan_shows_its_progress_in_a_terminal_and_can_be_silent():
    shown, printed = seen(PLAN)
    assert printed == "False\n" and "jrc.plan: " in shown
    assert seen(PLAN, JRC_PROGRESS="0") == ("", "False\n")


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
