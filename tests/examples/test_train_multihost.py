"""The example as a user starts it: by hand, interrupted, and resumed under SLURM."""

import json
import shutil
import signal
import time

import numpy as np
import pytest

from tests.processes import Processes, free_port, run_processes

SCRIPT = "examples/train_multihost.py"
TOY = "--steps 8 --layers 1 --width 64 --length 32 --rampup-step 3 --save-every 2".split()


def by_hand(out):
    where = ["--coordinator", f"localhost:{free_port()}", "--num-processes", 2]
    return [[SCRIPT, *TOY, "--out", out, *where, "--process-id", rank] for rank in range(2)]


def under_slurm():
    """Return the environment that `srun` gives each of its tasks."""
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost"}
    job |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    return [job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]


@pytest.mark.slow
def test_processes_train_and_resume_with_the_same_numbers(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    with Processes(by_hand(unbroken)) as processes:
        while not (unbroken / "state" / "jrc_0").exists():
            assert all(process.poll() is None for process in processes.all), processes.said()
            time.sleep(0.01)
        # The files are now as a kill would leave them.
        for process in processes.all:
            process.send_signal(signal.SIGSTOP)
        shutil.copytree(unbroken, broken)
        for process in processes.all:
            process.send_signal(signal.SIGCONT)
        first, second = processes.wait()
    for words in ("2 processes, 2 x cpu, DGC", " sent, ", " %", "kB sent per step"):
        assert words in first
    assert "skipped" not in first
    assert "parameters" not in second and "kB" not in second  # only process 0 prints

    resume = [[SCRIPT, *TOY, "--out", broken, "--resume"]] * 2
    run_processes(resume, under_slurm())

    one, two = (json.loads((out / "history.json").read_text()) for out in (unbroken, broken))
    for name in ("loss", "bytes_sent"):
        assert [s[name] for s in one["steps"]] == [s[name] for s in two["steps"]]
    assert len(one["steps"]) == 8 and np.isfinite([s["loss"] for s in one["steps"]]).all()
    assert one["steps"][-1]["bytes_sent"] < one["steps"][0]["bytes_sent"]

    alone = [[SCRIPT, *TOY, "--out", broken, "--resume"]]
    with Processes(alone) as processes:
        processes.all[0].wait()
        assert processes.all[0].returncode == 1
        assert "got others than processes=2, replicas=2" in processes.said()[0]
