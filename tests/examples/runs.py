"""Run an example as a user does, and interrupt it at a known step."""

import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]

# The run stops itself (as with Ctrl-Z) before step 9 until it gets SIGCONT: the interrupt arrives
# there, however busy the machine is. Every second step is saved.
STOPPING = """
import os, signal, sys
sys.path.insert(0, "examples")
import common, {script}

# A shell starts what runs in its background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def stopping(options, step, state, history, batch_of, *rest):
    def stop_or_batch(i):
        if i == 9:
            os.kill(os.getpid(), signal.SIGSTOP)
        return batch_of(i)
    return train(options, step, state, history, stop_or_batch, *rest)

train, common.train = common.train, stopping
{script}.main(sys.argv[1:])
"""


def run(script, *options):
    return run_python(f"examples/{script}.py", *options)


def run_python(*command, **env):
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=os.environ | env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_interrupted(script, *options):
    """Return the output of a run that gets Ctrl-C when nine steps are done."""
    command = [sys.executable, "-c", STOPPING.format(script=script), *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        try:
            assert _stopped(process.pid), process.stdout.read()
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            said = process.communicate(timeout=120)[0]
        finally:
            process.kill()
    assert process.returncode == 130, said
    return said


def _stopped(pid, seconds=240):
    """Return whether the process stops, and does not end, in this time; do not reap it."""
    deadline = time.time() + seconds
    kinds = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (found := os.waitid(os.P_PID, pid, kinds)) is None and time.time() < deadline:
        time.sleep(0.05)
    return found is not None and found.si_code == os.CLD_STOPPED
