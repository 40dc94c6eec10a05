"""JAX's processes of `benchmarks.network.steps`: dense momentum SGD and DGC."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from benchmarks._lib import platform
from benchmarks.network._worker import MOMENTUM, RATE, SETS, Answering, digest, serve
from jrc.models import resnet

AXIS = "data"
SPARSITY = 0.999


def shapes(one_leaf: bool, toy: bool) -> Any:
    """Return the leaves of a ResNet-50, or one leaf of as many entries."""
    config = resnet.Config(depth=14, classes=10, width=16) if toy else resnet.Config(depth=50)
    params, _ = jax.eval_shape(functools.partial(resnet.init, config=config), jax.random.key(0))
    if one_leaf:
        return jax.ShapeDtypeStruct((sum(x.size for x in jax.tree.leaves(params)),), jnp.float32)
    return params


def dense_mean(gradients: Any) -> Any:
    """Return the mean over all processes, by one ring all-reduce of all leaves."""
    leaves, treedef = jax.tree.flatten(gradients)
    mean = lax.pmean(jnp.concatenate([x.reshape(-1) for x in leaves]), AXIS)
    parts = jnp.split(mean, np.cumsum([x.size for x in leaves])[:-1])
    return treedef.unflatten([x.reshape(y.shape) for x, y in zip(parts, leaves, strict=True)])


def dense() -> tuple[Any, Callable[..., Any]]:
    """Return momentum SGD of the mean gradient."""
    tx = optax.sgd(RATE, momentum=MOMENTUM)
    return tx, lambda gradients, *rest: by_updates(tx, dense_mean(gradients), *rest)


def compressed(**options: Any) -> tuple[Any, Callable[..., Any]]:
    """Return momentum SGD with DGC, which sends one entry in a thousand."""
    tx = jrc.dgc_momentum(RATE, MOMENTUM, 0, sparsity=SPARSITY, axis_name=AXIS, **options)
    return tx, getattr(tx, "apply", functools.partial(by_updates, tx))


def by_updates(tx: Any, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Take one step of an optax optimizer."""
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

        # In the order of the results: JAX pairs donated buffers with results by shape.
        def one(gradients: Any, params: Any, state: Any) -> Any:
            return advance(jax.tree.map(lambda x: x[0], gradients), state, params)

        self.params = jax.jit(zeros, out_shardings=NamedSharding(mesh, P()))()
        self.state = jax.jit(over(tx.init, in_specs=P(), out_specs=specs))(self.params)
        step = over(one, in_specs=(P(AXIS), P(), specs), out_specs=(P(), specs))
        self.run = jax.jit(step, donate_argnums=(1, 2))
        self.taken = 0

    def step(self, sets: list[Any]) -> float:
        """Take one step, from local gradients to new parameters, and return its seconds."""
        gradients = sets[self.taken % len(sets)]
        began = time.perf_counter()
        self.params, self.state = self.run(gradients, self.params, self.state)
        jax.block_until_ready((self.params, self.state))
        self.taken += 1
        return time.perf_counter() - began


class Worker(Answering):
    """Answers requests with JAX."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        count = len(self.addresses)
        jax.distributed.initialize(self.at, count, self.rank)
        mesh = jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,))
        like = shapes(setup["one_leaf"], setup["toy"])
        made = {"dense": dense, "dgc": functools.partial(compressed, **setup["options"])}
        self._sets = [self._gradients(like, i, mesh) for i in range(SETS)]
        self._methods = {name: Method(made[name](), like, mesh) for name in setup["methods"]}
        self._like = like

    def about(self) -> dict[str, Any]:
        """Return device, version of JAX and number of parameters."""
        leaves = jax.tree.leaves(self._like)
        return {
            **platform.device(),
            "parameters": sum(x.size for x in leaves),
            "leaves": len(leaves),
        }

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the leaves, for PyTorch's processes."""
        return [x.shape for x in jax.tree.leaves(self._like)]

    def predicted(self) -> dict[str, float]:
        """Return the bytes that one process sends in a step, as `jrc.dgc_stats` reports them."""
        stats = jax.jit(jrc.dgc_stats)(self._methods["dgc"].state)
        found = {"dense": float(stats.bytes_dense), "dgc": float(stats.bytes_sent)}
        return {name: found[name] for name in self._methods}

    def digests(self) -> dict[str, int]:
        """Return a checksum of the parameters of each method."""
        return {
            name: digest(np.asarray(x) for x in jax.tree.leaves(method.params))
            for name, method in self._methods.items()
        }

    def _gradients(self, like: Any, number: int, mesh: Any) -> Any:
        """Draw a set of gradients, different on each process and in each set."""
        draw = np.random.default_rng((self.rank, number))
        split = NamedSharding(mesh, P(AXIS))

        def leaf(x: Any) -> jax.Array:
            values = draw.standard_normal((1, *x.shape), np.float32)
            return jax.make_array_from_process_local_data(split, values)

        return jax.tree.map(leaf, like)


if __name__ == "__main__":
    serve(Worker)
