"""The methods of `benchmarks.convergence.train`, and one run of a method."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jrc
from benchmarks.convergence._tasks import Settings, Task

WARM_UP = (0.75, 0.9375, 0.984375, 0.996, 0.999)
TO_99 = {"sparsity": (*WARM_UP[:3], 0.99)}


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to exchange gradients.

    Attributes:
        title: For a table, without the number of replicas.
        replicas: The number of replicas that share the batch.
        changes: Arguments of DGC that differ from the defaults of this benchmark; None for dense.
        corrected: Whether momentum is corrected, or else applied to the exchanged gradient.
        clipped: Whether dense clips the mean gradient.
    """

    title: str
    replicas: int
    changes: Mapping[str, Any] | None
    corrected: bool = True
    clipped: bool = True


METHODS = {
    "dense_4": Method("dense momentum SGD", 4, None),
    "unclipped_dense_4": Method("dense, no clipping", 4, None, clipped=False),
    "dgc_4": Method("DGC 99.9 %", 4, {}),
    "dgc99_4": Method("DGC 99 %", 4, TO_99),
    "unmasked99_4": Method("DGC 99 %, no factor masking", 4, TO_99 | {"factor_masking": False}),
    "unmasked_unramped99_4": Method(
        "DGC 99 %, no factor masking, no warm-up", 4,
        {"sparsity": (0.99,), "rampup_step": 1, "factor_masking": False},
    ),
    "uncorrected_4": Method("DGC, no momentum correction", 4, {}, corrected=False),
    "unmasked_4": Method("DGC, no factor masking", 4, {"factor_masking": False}),
    "unclipped_4": Method("DGC, no local clipping", 4, {"local_grad_clip_norm": None}),
    "unramped_4": Method("DGC, no warm-up", 4, {"sparsity": (0.999,), "rampup_step": 1}),
    "dense_8": Method("dense momentum SGD", 8, None),
    "dgc_8": Method("DGC 99.9 %", 8, {}),
}  # fmt: skip
"""All methods; a name ends in the number of replicas."""


def optimizer(method: Method, settings: Settings) -> optax.GradientTransformation:
    """Return the method's optimizer; rate, momentum and bound of the gradient are shared."""
    momentum, clip = settings["momentum"], settings["clip"]
    rate = optax.warmup_cosine_decay_schedule(
        0.0, settings["rate"], settings["rate_warm_up"], settings["steps"]
    )
    if method.changes is None:
        dense = optax.sgd(rate, momentum)
        return optax.chain(optax.clip_by_global_norm(clip), dense) if method.clipped else dense
    options = {
        "rampup_begin_step": 0,
        "rampup_step": settings["rampup_step"],
        "sparsity": WARM_UP,
        "local_grad_clip_norm": clip,
        "axis_name": "data",
        "min_size": settings["min_size"],
        **method.changes,
    }
    if method.corrected:
        return jrc.dgc_momentum(rate, momentum, **options)
    plain = jrc.scale_by_dgc(0.0, **options)
    return optax.chain(plain, optax.trace(momentum), optax.scale_by_learning_rate(rate))


class Trainer:
    """A task under a method, compiled once for all seeds."""

    def __init__(self, task: Task, method: Method) -> None:
        self.task, self.method = task, method
        self.mesh = Mesh(jax.devices()[: method.replicas], ("data",))
        self.tx = optimizer(method, task.settings)
        self.step = jrc.make_train_step(task.loss_fn, self.tx, mesh=self.mesh)

    def run(self, seed: int, status: Callable[[str], None]) -> dict[str, Any]:
        """Train with one seed.

        Args:
            seed: Of parameters and batches, the same for every method.
            status: Called with the progress at each evaluation.

        Returns:
            The record of the run: its curve, and figures of the whole run.
        """
        began = time.perf_counter()
        task, steps = self.task, self.task.settings["steps"]
        params, model_state = task.init(jax.random.key(seed))
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        # The step donates its state, so the state gets a key of its own.
        key = jax.random.key(seed + 1)
        state = jrc.init_state(params, self.tx, key, model_state=model_state, mesh=self.mesh)
        totals = _Totals()
        curve = [self._point(0, state, totals)]
        points = evaluated(steps, task.settings["evaluations"])
        for i in range(steps):
            state, info = self.step(state, task.batch_of(seed, i))
            totals.add(info)
            if i + 1 in points:
                curve.append(self._point(i + 1, state, totals))
                loss = f"{curve[-1]['loss']:.3f} {task.unit}"
                status(f"step {i + 1:,} of {steps:,}, {loss}")
        replicas = self.method.replicas
        return {
            "curve": curve,
            "final": {name: curve[-1][name] for name in ("loss", "accuracy") if name in curve[-1]},
            "bytes_sent": totals.sent,
            "bytes_last": totals.last["bytes_sent"],
            "bytes_dense": steps * 2 * (replicas - 1) / replicas * 4 * size,
            "density": totals.last["density"],
            "parameters": size,
            "compressed": compressed_share(params, self.method, task.settings["min_size"]),
            "norm_kept": totals.last["norm_kept"],
            "skipped": totals.skipped,
            "seconds": time.perf_counter() - began,
            "device": f"{replicas} x {jax.devices()[0].device_kind}",
            "jax": jax.__version__,
        }

    def _point(self, step: int, state: Any, totals: "_Totals") -> dict[str, float]:
        """Return the losses in the task's unit, and the bytes sent so far."""
        train = {"train_loss": self.task.per_nat * totals.close()} if step else {}
        # Off the mesh, on which each replica would evaluate the same.
        held_out = self.task.evaluate(*jax.device_get((state.params, state.model_state)))
        return {"step": step, "bytes": totals.sent, **train, **held_out}


class _Totals:
    """Sums over the steps; the infos stay on the devices until `close`, so that steps overlap."""

    def __init__(self) -> None:
        self.sent, self.skipped, self.last, self._open = 0.0, 0, {}, []

    def add(self, info: Any) -> None:
        """Add the info of one step."""
        self._open.append(info._replace(aux=None))

    def close(self) -> float:
        """Sum what was added since the last call; return its mean training loss, nats."""
        infos = [info._asdict() for info in jax.device_get(self._open)]
        self._open = []
        self.sent += sum(float(info["bytes_sent"]) for info in infos)
        self.skipped += sum(bool(info["skipped"]) for info in infos)
        self.last = {name: float(x) for name, x in infos[-1].items() if x is not None}
        return float(np.mean([info["loss"] for info in infos]))


def evaluated(steps: int, count: int) -> set[int]:
    """Return after which steps to evaluate: closer together at first, the last included."""
    return {max(1, round(steps * (i / count) ** 2)) for i in range(1, count + 1)}


def compressed_share(params: Any, method: Method, min_size: int) -> float:
    """Return the share of the parameters that is compressed."""
    if method.changes is None:
        return 0.0
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    return sum(size for size in sizes if size >= min_size) / sum(sizes)
