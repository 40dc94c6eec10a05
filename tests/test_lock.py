"""One writer at a time: in a program, among programs, and after a kill."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import jax
import numpy as np

import jrc
from jrc import _lock
from tests.processes import ROOT
from tests.save_again_and_again import state_of

HOLD = f"""
import runpy, sys, time
with runpy.run_path({str(pathlib.Path(_lock.__file__))!r})["locked"](sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_second_waits_and_nothing_is_left(tmp_path):
    path, order = str(tmp_path / "lock"), []

    def second():
        with _lock.locked(path):
            order.append("second")

    with _lock.locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and not os.listdir(tmp_path)


def test_a_killed_holder_lets_go(tmp_path):
    path = str(tmp_path / "lock")
    command = [sys.executable, "-c", HOLD, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGKILL)
    assert os.path.exists(path)
    with _lock.locked(path):
        pass
    assert not os.path.exists(path)


def test_runs_that_save_to_one_folder_at_once_tear_and_lose_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.save_again_and_again", str(tmp_path)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen(
            [*command, number, "6"], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True
        )
        for number in ("1", "2")
    ]
    said = [writer.communicate(timeout=240)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], said
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["jrc_11"]
    found = jrc.restore(tmp_path / "state", state_of(0.0))
    values = {float(x) for leaf in jax.tree.leaves(found) for x in np.unique(leaf)}
    assert len(values) == 1 and values <= {1.0, 2.0}
