"""One writer to a folder at a time: in a process, among processes, after a kill and a fork."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import filelock
import jax
import numpy as np
import pytest

import jrc
from jrc.persist import _folder
from jrc.persist._folder import LOCK, only_writer
from tests.processes import ROOT
from tests.save_again_and_again import state_of

HOLD = """
import sys, time
from jrc.persist._folder import only_writer
with only_writer(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(600)
"""
ENV = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def is_free(folder):
    try:
        with filelock.FileLock(folder / LOCK, timeout=0):
            return True
    except filelock.Timeout:
        return False


def test_the_second_writer_waits(tmp_path):
    order = []

    def second():
        with only_writer(str(tmp_path)):
            order.append("second")

    with only_writer(str(tmp_path)):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and os.listdir(tmp_path) == [LOCK]


def test_the_lock_of_a_killed_process_is_released(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        assert not is_free(tmp_path)
        process.send_signal(signal.SIGKILL)
    assert is_free(tmp_path)


def test_a_second_run_says_that_it_waits_and_gives_up_after_a_time(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_folder, "SECONDS_UNTOLD", 0.1)
    monkeypatch.setattr(_folder, "SECONDS_AT_MOST", 0.3)
    refused = (
        rf"jrc.save: path must be a folder to which no other run saves, got {tmp_path}, which "
        "another run has kept locked for 0.3 s. Give each run a folder of its own"
    )
    with only_writer(str(tmp_path)), pytest.raises(TimeoutError, match=refused):
        jrc.save(tmp_path, state_of(1.0))
    assert caplog.messages == [
        f"jrc.save: another run saves to {tmp_path}. Waiting for it, at most 0.3 s."
    ]
    jrc.save(tmp_path, state_of(1.0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """A data loader that was forked during a save inherits the descriptor of the lock."""
    with only_writer(str(tmp_path)):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        assert is_free(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_a_save_goes_on_with_a_warning(number, tmp_path, monkeypatch, caplog):
    def acquire(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    jrc.save(tmp_path, state_of(1.0))
    assert "Let one run at a time save there" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["jrc_0"]


@pytest.mark.slow
def test_runs_that_save_to_one_folder_at_once_lose_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.save_again_and_again", str(tmp_path)]
    writers = [
        subprocess.Popen(
            [*command, number, "6"], cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True
        )
        for number in ("1", "2")
    ]
    errors = [writer.communicate(timeout=240)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], errors
    assert sorted(os.listdir(tmp_path / "state")) == [LOCK, "jrc_11"]
    found = jrc.restore(tmp_path / "state", state_of(0.0))
    values = {float(x) for leaf in jax.tree.leaves(found) for x in np.unique(leaf)}
    assert len(values) == 1 and values <= {1.0, 2.0}
