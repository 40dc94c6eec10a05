"""The requests that every worker of this folder answers, JAX's and PyTorch's.

A worker is started with its setup, JSON, as its only argument. Each line of standard input is a
request in JSON, and its answer is a line of standard output. A worker ends with its input.
"""

import json
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.network import _links as network_links

# Shared by all methods: sets of prepared gradients, and the optimizer.
SETS = 3
RATE, MOMENTUM = 1e-3, 0.9
CHUNK = 1 << 20


class Answering:
    """Answers requests; each public method is one."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.rank, self.addresses = setup["rank"], setup["addresses"]
        self.interface = setup["interface"]
        self.at = f"{self.addresses[0]}:{setup['port']}"
        # By name: `step(sets)` takes one step and returns its seconds.
        self._methods: dict[str, Any] = {}
        self._sets: list[Any] = []

    def steps(self, method: str, count: int) -> list[float]:
        """Take steps of a method and return the seconds of each."""
        return [self._methods[method].step(self._sets) for _ in range(count)]

    def counters(self) -> dict[str, int] | None:
        """Return the bytes sent and received so far, or None on loopback."""
        return self.interface and network_links.counters(self.interface)

    def transfer(self, nbytes: int, ports: list[int]) -> float:
        """Return the Mbit/s that arrive while each process sends to the next."""
        own, following = self.rank, (self.rank + 1) % len(ports)
        with socket.create_server((self.addresses[own], ports[own])) as server:
            to = (self.addresses[following], ports[following])
            sender = threading.Thread(target=_send, args=(to, nbytes))
            sender.start()
            with server.accept()[0] as arriving:
                arriving.recv(CHUNK)
                received, began = 0, time.perf_counter()
                while data := arriving.recv(CHUNK):
                    received += len(data)
                seconds = time.perf_counter() - began
            sender.join()
        return received * 8e-6 / seconds


def batches(model: Mapping[str, int], rank: int, number: int) -> np.ndarray:
    """Draw tokens `int32[batch, length + 1]`, different on each process and for each number."""
    draw = np.random.default_rng((rank, number))
    shape = model["batch"], model["length"] + 1
    return draw.integers(0, model["vocabulary"], shape, np.int32)


def digest(leaves: Iterable[Any]) -> int:
    """Return a checksum of arrays, which must be equal on all processes."""
    crc = 0
    for leaf in leaves:
        crc = zlib.crc32(leaf.data, crc)
    return crc


def serve(make: Callable[[dict[str, Any]], Answering]) -> None:
    """Run a worker until its input ends."""
    # Libraries write to standard output too: send that to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = make(json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(worker, request.pop("do"))(**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    # A normal exit would wait for the other processes, which may have ended.
    os._exit(0)


def _send(to: tuple[str, int], nbytes: int) -> None:
    with _connected(to) as sending:
        data = memoryview(bytes(CHUNK))
        for start in range(0, nbytes, CHUNK):
            sending.sendall(data[: nbytes - start])


def _connected(to: tuple[str, int], seconds: float = 30) -> socket.socket:
    """Connect to a neighbour that may not listen yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(to, timeout=seconds)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
