"""Starting the processes of one run on this machine, and what they said when one of them failed."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]


def run_python(code, **settings):
    """What Python printed for this code, with these environment variables; `None` leaves one out.

    An error with all that it wrote if it does not end well.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | settings
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={name: value for name, value in env.items() if value is not None},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def ranks(module, count, *arguments):
    """`-m MODULE PORT COUNT RANK *ARGUMENTS` for every rank."""
    port = free_port()
    return [["-m", module, port, count, rank, *arguments] for rank in range(count)]


class Processes:
    """Python with each of these arguments and settings; no process outlives the block."""

    def __init__(self, commands, settings=None):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        self.all, self._files = [], []
        for command, more in zip(commands, settings or [{}] * len(commands), strict=True):
            # Files, because a full pipe would stop a process that others wait for.
            file = tempfile.TemporaryFile("w+")
            command, env_of = [sys.executable, *map(str, command)], env | more
            process = subprocess.Popen(
                command, cwd=ROOT, env=env_of, stdout=file, stderr=subprocess.STDOUT
            )
            self.all.append(process)
            self._files.append(file)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        for file in self._files:
            file.close()

    def kill(self):
        for process in self.all:
            process.kill()
            process.wait()

    def said(self):
        """What each process wrote until now."""
        return [(file.seek(0), file.read())[1] for file in self._files]

    def wait(self, seconds=240):
        """What each process wrote, once all have ended well; an error with it if one does not."""
        deadline = time.time() + seconds
        while (codes := [process.poll() for process in self.all]) != [0] * len(codes):
            # Those that wait for a failed one would do so for minutes.
            if any(codes) or time.time() > deadline:
                time.sleep(2)
                self.kill()
                texts = [f"process {i}: {code}\n{text}" for i, (code, text) in self._ends(codes)]
                raise AssertionError("\n".join(texts))
            time.sleep(0.05)
        return self.said()

    def _ends(self, codes):
        return enumerate(zip(codes, self.said(), strict=True))


def run_processes(commands, settings=None):
    with Processes(commands, settings) as processes:
        return processes.wait()
