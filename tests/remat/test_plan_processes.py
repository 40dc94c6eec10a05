import json
import os
import pathlib
import socket
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).with_name("plan_in_processes.py")


def test_all_processes_get_the_plan_of_the_first():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(port), "2", str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    first, second = (json.loads(out[out.index("{") :]) for out, _ in said)
    assert first == second
    assert first["verified"]["flops_ratio"] > 1
