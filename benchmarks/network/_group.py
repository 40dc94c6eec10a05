"""The processes of the commands of this folder: started, sent requests, and ended."""

import contextlib
import json
import os
import pathlib
import select
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks._lib.child import ROOT
from benchmarks.network._links import Links, Loopback

TIMEOUT = 900
TRANSFER = 46100
# Groups that run at the same time need different ports.
COORDINATORS = {
    "_jax_worker": 46000, "_torch_worker": 46001, "_jax_training": 46002, "_torch_training": 46003
}  # fmt: skip


class Group:
    """One worker on each link; every request goes to all of them.

        with Links(2) as links, Group(links, setup, "cpu") as group:
            group.ask("steps", method="dgc", count=3)

    Groups of different `worker`s, modules of this folder, can share the links.

    Raises:
        RuntimeError: From `ask`, if a worker ends or does not answer in time; with its errors.
    """

    def __init__(
        self,
        links: Links | Loopback,
        setup: dict[str, Any],
        platform: str,
        worker: str = "_jax_worker",
    ) -> None:
        self.links = links
        self._module = f"benchmarks.network.{worker}"
        self._workers: list[subprocess.Popen[str]] = []
        self._undo = contextlib.ExitStack()
        # One device a process, whatever the caller has configured.
        self._env = os.environ | {
            "JAX_PLATFORMS": platform, "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""
        }  # fmt: skip
        self._ports = _ports(links, COORDINATORS[worker])
        addresses = [links.address(rank) for rank in range(links.count)]
        self._setup = setup | {
            "addresses": addresses, "interface": links.interface, "port": self._ports[-1]
        }  # fmt: skip

    def __enter__(self) -> "Group":
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            folder = undo.enter_context(tempfile.TemporaryDirectory())
            self._errors = [pathlib.Path(folder, str(rank)) for rank in range(self.links.count)]
            for rank in range(self.links.count):
                self._start(rank)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo.close()

    def ask(self, request: str, **arguments: Any) -> list[Any]:
        """Send a request and return the answers of all workers, in the order of their ranks."""
        for rank, worker in enumerate(self._workers):
            try:
                worker.stdin.write(json.dumps({"do": request, **arguments}) + "\n")
                worker.stdin.flush()
            except BrokenPipeError:
                raise self._failure(rank, f"ended before {request!r}") from None
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT
        while waiting := [rank for rank in range(self.links.count) if rank not in answers]:
            streams = [self._workers[rank].stdout for rank in waiting]
            ready = select.select(streams, [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise self._failure(waiting[0], f"did not answer {request!r} in {TIMEOUT} s")
            for rank in (r for r in waiting if self._workers[r].stdout in ready):
                line = self._workers[rank].stdout.readline()
                if not line:
                    raise self._failure(rank, f"ended during {request!r}")
                answers[rank] = json.loads(line)
        return [answers[rank] for rank in range(self.links.count)]

    def transfer(self, nbytes: int) -> list[float]:
        """Return the Mbit/s of plain TCP at each process, all links busy in both directions."""
        return self.ask("transfer", nbytes=nbytes, ports=self._ports[:-1])

    def _start(self, rank: int) -> None:
        setup = json.dumps(self._setup | {"rank": rank})
        with self._errors[rank].open("w") as errors:
            # A session of its own: Ctrl-C reaches only the parent, which ends its workers.
            worker = subprocess.Popen(
                [*self.links.enter(rank), sys.executable, "-m", self._module, setup],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=self._env, start_new_session=True, cwd=ROOT,
            )  # fmt: skip
        self._workers.append(worker)

    def _failure(self, rank: int, what: str) -> RuntimeError:
        errors = self._errors[rank].read_text()[-4000:]
        return RuntimeError(f"benchmarks.network: process {rank} {what}. Its errors:\n{errors}")

    def _end(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait()
            worker.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()


def _ports(links: Links | Loopback, coordinator: int) -> list[int]:
    """Return a port for each process's transfers, and the coordinator's last."""
    if isinstance(links, Links):
        return [*range(TRANSFER, TRANSFER + links.count), coordinator]
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(links.count + 1)]
        for each in sockets:
            each.bind((links.address(0), 0))
        return [each.getsockname()[1] for each in sockets]
