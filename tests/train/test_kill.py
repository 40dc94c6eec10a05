"""A run that is killed at any moment goes on from its last save as if nothing had happened."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

import jrc
from tests.train.tasks import dgc, same_bits, start

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["digits", pytest.param("gpt with dropout", marks=pytest.mark.exhaustive)]
)
def test_killed_run_resumes_bit_for_bit(task, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "tests.train.run_until_killed", str(tmp_path), task],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        lines = iter(process.stdout.readline, "")
        reached = next(int(line) for line in lines if int(line) >= 5)
        time.sleep(random.uniform(0, 0.1))  # anywhere between two saves, or in the middle of one
        process.send_signal(signal.SIGKILL)

    state, step, batch = start(task, dgc())
    restored = jrc.restore(tmp_path, state)
    assert int(restored.step) >= reached
    for i in range(int(restored.step)):
        state, _ = step(state, batch(i))
    assert same_bits(restored, state)
    for i in range(int(state.step), int(state.step) + 3):
        state, info = step(state, batch(i))
        restored, again = step(restored, batch(i))
    assert same_bits(restored, state) and same_bits(info, again)
