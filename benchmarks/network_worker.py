"""What one process of `network.py` runs: two optimizers, a step of either when it is told so.

    python benchmarks/network_worker.py SETUP

SETUP is JSON; then a request in JSON on each line of standard input has an answer on a line of
standard output. It ends with its input.
"""

import functools
import json
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import machine
import network_links
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc.models import resnet

AXIS = "data"
SETS = 3
RATE, MOMENTUM, SPARSITY = 1e-3, 0.9, 0.999
CHUNK = 1 << 20


def shapes(one_leaf: bool, toy: bool) -> Any:
    """The leaves of a ResNet-50, or one leaf of as many entries."""
    config = resnet.Config(depth=14, classes=10, width=16) if toy else resnet.Config(depth=50)
    params, _ = jax.eval_shape(functools.partial(resnet.init, config=config), jax.random.key(0))
    if one_leaf:
        return jax.ShapeDtypeStruct((sum(x.size for x in jax.tree.leaves(params)),), jnp.float32)
    return params


def dense_mean(gradients: Any) -> Any:
    """The mean over all processes, in one ring all-reduce of all leaves."""
    leaves, treedef = jax.tree.flatten(gradients)
    mean = lax.pmean(jnp.concatenate([x.reshape(-1) for x in leaves]), AXIS)
    parts = jnp.split(mean, np.cumsum([x.size for x in leaves])[:-1])
    return treedef.unflatten([x.reshape(y.shape) for x, y in zip(parts, leaves, strict=True)])


def dense() -> tuple[Any, Callable[..., Any]]:
    """Momentum SGD of the mean gradient."""
    tx = optax.sgd(RATE, momentum=MOMENTUM)
    return tx, lambda gradients, *rest: by_updates(tx, dense_mean(gradients), *rest)


def compressed(**options: Any) -> tuple[Any, Callable[..., Any]]:
    """The same by jrc, one entry in a thousand."""
    tx = jrc.dgc_momentum(RATE, MOMENTUM, 0, sparsity=SPARSITY, axis_name=AXIS, **options)
    return tx, getattr(tx, "apply", functools.partial(by_updates, tx))


def by_updates(tx: Any, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


class Method:
    """An optimizer with parameters and state of its own, on the mesh of all processes."""

    def __init__(self, made: tuple[Any, Callable[..., Any]], like: Any, mesh: Any) -> None:
        tx, advance = made
        over = functools.partial(jax.shard_map, mesh=mesh)
        specs = jrc.dgc_specs(jax.eval_shape(tx.init, like), AXIS)

        def zeros() -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

        # In the order in which they come back: JAX pairs what is donated with results by shape.
        def one(gradients: Any, params: Any, state: Any) -> Any:
            return advance(jax.tree.map(lambda x: x[0], gradients), state, params)

        self.params = jax.jit(zeros, out_shardings=NamedSharding(mesh, P()))()
        self.state = jax.jit(over(tx.init, in_specs=P(), out_specs=specs))(self.params)
        step = over(one, in_specs=(P(AXIS), P(), specs), out_specs=(P(), specs))
        self.run = jax.jit(step, donate_argnums=(1, 2))
        self.taken = 0

    def step(self, sets: list[Any]) -> float:
        """Seconds of one whole step, from local gradients to new parameters."""
        gradients = sets[self.taken % len(sets)]
        began = time.perf_counter()
        self.params, self.state = self.run(gradients, self.params, self.state)
        jax.block_until_ready((self.params, self.state))
        self.taken += 1
        return time.perf_counter() - began


class Worker:
    """Answers requests; each method without an underscore is one."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.rank, self.addresses = setup["rank"], setup["addresses"]
        self.interface = setup["interface"]
        count = len(self.addresses)
        jax.distributed.initialize(f"{self.addresses[0]}:{setup['port']}", count, self.rank)
        mesh = jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,))
        like = shapes(setup["one_leaf"], setup["toy"])
        self._sets = [self._gradients(like, i, mesh) for i in range(SETS)]
        self._methods = {
            "dense": Method(dense(), like, mesh),
            "dgc": Method(compressed(**setup["options"]), like, mesh),
        }
        self._like = like

    def about(self) -> dict[str, Any]:
        leaves = jax.tree.leaves(self._like)
        return {
            **machine.device(),
            "parameters": sum(x.size for x in leaves),
            "leaves": len(leaves),
        }

    def steps(self, method: str, count: int) -> list[float]:
        return [self._methods[method].step(self._sets) for _ in range(count)]

    def counters(self) -> dict[str, int] | None:
        return self.interface and network_links.counters(self.interface)

    def predicted(self) -> dict[str, float]:
        """Bytes that one process sends in a step, as `jrc.dgc_stats` says after one."""
        stats = jax.jit(jrc.dgc_stats)(self._methods["dgc"].state)
        return {"dense": float(stats.bytes_dense), "dgc": float(stats.bytes_sent)}

    def digests(self) -> dict[str, int]:
        """The parameters of each method in a number, to be the same on all processes."""

        def digest(params: Any) -> int:
            host = [np.asarray(x) for x in jax.tree.leaves(params)]
            return functools.reduce(lambda crc, x: zlib.crc32(x.data, crc), host, 0)

        return {name: digest(method.params) for name, method in self._methods.items()}

    def transfer(self, nbytes: int, ports: list[int]) -> float:
        """Mbit/s that arrive while each process sends to the next, which fills every link."""
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

    def _gradients(self, like: Any, number: int, mesh: Any) -> Any:
        """Prepared ones, others on each process and in each set."""
        draw = np.random.default_rng((self.rank, number))
        split = NamedSharding(mesh, P(AXIS))

        def leaf(x: Any) -> jax.Array:
            values = draw.standard_normal((1, *x.shape), np.float32)
            return jax.make_array_from_process_local_data(split, values)

        return jax.tree.map(leaf, like)


def _send(to: tuple[str, int], nbytes: int) -> None:
    with _connected(to) as sending:
        data = memoryview(bytes(CHUNK))
        for start in range(0, nbytes, CHUNK):
            sending.sendall(data[: nbytes - start])


def _connected(to: tuple[str, int], seconds: float = 30) -> socket.socket:
    """A connection to a neighbour that may not listen yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(to, timeout=seconds)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def main() -> None:
    # Libraries write to standard output too: they get the place of errors.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(worker, request.pop("do"))(**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    # An orderly end would wait for the other processes, which may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()
