"""JAX's processes of `benchmarks.network.training`: train steps of a GPT, with jrc."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from benchmarks._lib import platform
from benchmarks.network._training_methods import (
    CLIP,
    DECAY,
    METHODS,
    MOMENTUM,
    RATE,
    SPARSITY,
    exchanges,
)
from benchmarks.network._worker import SETS, Answering, batches, digest, serve
from jrc.models import gpt

AXIS = "data"


def optimizer(name: str) -> optax.GradientTransformation:
    """Return the optimizer of a method: the inner one, where there is an outer one."""
    if name == "dgc":
        return jrc.dgc_momentum(
            RATE, MOMENTUM, 0, sparsity=SPARSITY, local_grad_clip_norm=CLIP, axis_name=AXIS
        )
    clip = optax.clip_by_global_norm(CLIP)
    if METHODS[name].sgd:
        return optax.chain(clip, optax.sgd(RATE, momentum=MOMENTUM))
    return optax.chain(clip, optax.adamw(RATE, weight_decay=DECAY))


def config_of(model: Mapping[str, int]) -> gpt.Config:
    """Return the GPT as one loop over its blocks, which compiles in a quarter of the time."""
    return gpt.Config(**{name: n for name, n in model.items() if name != "batch"}, scan=True)


@functools.cache
def _init(config: gpt.Config) -> Callable[[jax.Array], Any]:
    """Return a program that makes the parameters; each block begins with new ones."""
    return jax.jit(functools.partial(gpt.init, config=config))


class Method:
    """A way to train; it has a state between `begin` and `end`, and compiles once."""

    def __init__(self, name: str, config: gpt.Config, mesh: Mesh) -> None:
        self.about, self.config, self.mesh = METHODS[name], config, mesh
        self.tx, self.compared = optimizer(name), exchanges(name)
        loss_fn = functools.partial(gpt.loss, config=config)
        self._step = jrc.make_train_step(loss_fn, self.tx, mesh=mesh, outer=self.about.outer)
        self._state: Any = None
        self._infos: list[Any] = []

    def begin(self, taken: int) -> None:
        """Make a new state, as if that many steps had been taken."""
        params = _init(self.config)(jax.random.key(0))
        state = jrc.init_state(
            params, self.tx, jax.random.key(1), mesh=self.mesh, outer=self.about.outer
        )
        self._state = state._replace(step=jax.jit(lambda step: step + taken)(state.step))
        self._infos = []
        jax.block_until_ready(self._state)

    def warm_up(self, sets: list[Any]) -> None:
        """Compile the inner step, and the steps that end a round."""
        self.begin(self.about.every - 1)
        for _ in range(2 + self.about.overlap):
            self.step(sets)
        self.end()

    def step(self, sets: list[Any]) -> float:
        """Take one step, from a batch to new parameters, and return its seconds."""
        split = NamedSharding(self.mesh, P(AXIS))
        own = sets[len(self._infos) % len(sets)]
        batch = jax.make_array_from_process_local_data(split, own)
        began = time.perf_counter()
        self._state, info = self._step(self._state, batch)
        jax.block_until_ready((self._state, info))
        seconds = time.perf_counter() - began
        self._infos.append(info)
        return seconds

    def forget(self) -> None:
        """Forget the steps so far; the state stays."""
        self._infos = []

    def end(self) -> dict[str, Any]:
        """Drop the state; return its checksum, predicted bytes a step and the last loss."""
        losses = [info.loss if info.losses is None else info.losses for info in self._infos]
        leaves = jax.tree.leaves(self._state.params)
        found = {
            "digest": digest(np.asarray(x) for x in leaves) if self.compared else None,
            "bytes": math.fsum(float(info.bytes_sent) for info in self._infos) / len(losses),
            "loss": float(np.mean(np.asarray(losses[-1]))),
        }
        self._state, self._infos = None, []
        return found


class Worker(Answering):
    """Answers requests with JAX."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        count = len(self.addresses)
        jax.distributed.initialize(self.at, count, self.rank)
        together = jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,))
        alone = Mesh(jax.local_devices(), (AXIS,))
        self._config = config_of(setup["model"])
        self._sets = [batches(setup["model"], self.rank, i) for i in range(SETS)]
        self._methods = {
            name: Method(name, self._config, together if exchanges(name) else alone)
            for name in setup["methods"]
        }

    def about(self) -> dict[str, Any]:
        """Return device, version of JAX and number of parameters."""
        sizes = (math.prod(shape) for _, shape in self.leaves())
        return {**platform.device(), "parameters": sum(sizes)}

    def leaves(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return path and shape of each leaf, block by block, for PyTorch's processes."""
        config = dataclasses.replace(self._config, scan=False)
        shapes = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
        paths = jax.tree.leaves_with_path(shapes)
        return [(jax.tree_util.keystr(at, simple=True, separator="/"), x.shape) for at, x in paths]

    def warm_up(self, method: str) -> None:
        """Compile a method."""
        self._methods[method].warm_up(self._sets)

    def begin(self, method: str) -> None:
        """Make a new state, so that a whole round follows and its result arrives in it.

        One step is taken that is not counted: it touches memory that is new to the process.
        """
        at = self._methods[method]
        at.begin(at.about.overlap)
        at.step(self._sets)
        at.forget()

    def end(self, method: str) -> dict[str, Any]:
        """Drop the state and return what is to be compared."""
        return self._methods[method].end()


if __name__ == "__main__":
    serve(Worker)
