"""Compile whole train steps of a Llama of 1 B on meshes of accelerators that are not there.

    python -m benchmarks.targets.sharded_step --targets v5e:4x4,h100:8 \
        --out benchmarks/results/sharded_step.json

For each target: FSDP x tensor parallelism in one `jrc.make_train_step` with AdamW, with nothing
recomputed, with every layer under `jax.checkpoint`, and with a plan for nine tenths of a device's
memory. On two nodes of GPUs, or two slices of TPUs (`2*v5e:4x4`): DGC between them, beside a dense
exchange. Peaks and bytes are those of one device, as the target's own compiler states them; bytes
that a device sends are counted around a ring, from the compiled program.

Nothing is run. Compilations take up to minutes: rows that `--out` has are not measured again, and
each is written as soon as it is there. A target whose compiler is not installed is left out.
"""

import argparse
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, at_least
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._models import llama
from benchmarks._private import collectives_of, compiled_step, memory_text

NAME = "targets.sharded_step"
PLAIN, LAYERS, PLAN = "baseline", "every layer", "plan"
DENSE, DGC = "dense", "DGC 99.9 %"
AXES = ("replica", "fsdp", "model")
TENSORS = 2
TOY = llama.Sizes(2, 64, 4, 2, 128, 512, 64)


@dataclasses.dataclass(frozen=True)
class Place:
    """Devices that programs are compiled for.

    Attributes:
        target: What each part is made of.
        mesh: The devices, over `AXES`; one replica for each node or slice.
    """

    target: jrc.Target
    mesh: Mesh

    @property
    def replicas(self) -> int:
        """Number of nodes or slices."""
        return self.mesh.shape["replica"]


def place_of(name: str) -> Place:
    """Return a mesh over a target, or over several slices: `"2*v5e:4x4"`."""
    count, star, rest = name.rpartition("*")
    target = jrc.target(rest)
    devices = target.devices  # also loads the compiler
    replicas = int(count) if star else 1
    if target.platform == "gpu":
        replicas = target.dims[1]
    inside = (len(devices) * (replicas if star else 1)) // replicas
    shape = (inside // TENSORS, TENSORS)
    if star:
        both = topologies.get_topology_desc(rest, "tpu", num_slices=replicas).devices
        array = mesh_utils.create_hybrid_device_mesh(
            (1, *shape), (replicas, 1, 1), both, allow_split_physical_axes=True
        )
    else:
        array = np.asarray(devices).reshape(replicas, *shape)
    return Place(target, Mesh(array, AXES, axis_types=(AxisType.Auto,) * 3))


def measure(run: Run) -> None:
    """Compile every step of every target, row by row."""
    run.report |= platform.machine()
    rows = run.report.setdefault("rows", {})
    for name in run.options.targets:
        try:
            place = place_of(name)
        except ImportError as error:
            run.console.print(f"{name} is left out: {error}")
            continue
        found = rows.setdefault(name, {})
        for way in (DENSE, DGC) if place.replicas > 1 else (PLAIN, LAYERS, PLAN):
            if way not in found:
                run.status(f"{name}: {way}")
                found[way] = _row(place, way, run.options, place.target.platform)
                run.save()


def _row(place: Place, way: str, options: Any, platform_name: str) -> dict[str, Any]:
    """Return the peak, the plan's FLOPs, and what a device sends, of one step."""
    sizes = TOY if options.toy else llama.Sizes()
    began = time.perf_counter()
    step, state, batch = _step(place, way, sizes, options.batch * place.mesh.shape["fsdp"])
    memory, text = compiled_step(step, state, batch, platform_name)
    row: dict[str, Any] = {
        "mesh": dict(place.mesh.shape),
        "batch": batch.shape[0],
        "length": sizes.length,
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "peak": memory.peak,
        "budget": place.target.budget,
        "collectives": [
            dataclasses.asdict(each) | {"sent": each.sent, "rerun_sent": each.rerun_sent}
            for each in collectives_of(text, place.mesh)
        ],
    }
    if step.plan is not None:
        cost = step.plan.verified
        row |= {"flops": cost.flops_ratio, "compilations": step.plan.compilations}
    return row | {"seconds": time.perf_counter() - began}


def _step(place: Place, way: str, sizes: llama.Sizes, batch: int) -> tuple[Any, Any, Any]:
    """Return the step, with shapes of its state and of a batch."""
    mesh, hybrid = place.mesh, place.replicas > 1
    shape = lambda x, spec: jax.ShapeDtypeStruct(  # noqa: E731
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    params = llama.shapes(sizes)
    params = jax.tree.map(shape, params, llama.specs(params, hybrid))
    wrap = jax.checkpoint if hybrid or way == LAYERS else lambda block: block
    loss = functools.partial(llama.loss, sizes=sizes, wrap=wrap)
    tx = optax.adamw(3e-4)
    options: dict[str, Any] = {"axis_name": "fsdp", "via": "jit"}
    if hybrid:
        options = {"axis_name": "replica"}
        tx = optax.sgd(0.1, momentum=0.9)
    if way == DGC:
        tx = jrc.dgc_momentum(0.1, 0.9, 0, sparsity=0.999, axis_name="replica")
    if way == PLAN:
        options["memory_budget"] = place.target.budget
    key = jax.random.key(0)
    state = jrc.init_state(params, tx, key, mesh=mesh, axis_name=options["axis_name"])
    step = jrc.make_train_step(loss, tx, mesh=mesh, **options)
    rows = P(("replica", "fsdp"))
    tokens = jax.ShapeDtypeStruct((batch * place.replicas, sizes.length + 1), jnp.int32)
    return step, state, shape(tokens, rows)


def tables(report: Report) -> list[Table]:
    """Return one row for each step, and the bytes that its device sends along each axis."""
    rows = [
        (name, _mesh_text(row), f"{row['batch']:,}", way, *_costs(row))
        for name, ways in report["rows"].items()
        for way, row in ways.items()
    ]
    heads = ("", "mesh", "sequences", "step", "peak", "FLOPs", *AXES, "re-run")
    title = (
        "Steps of a Llama of 1 B on meshes of fsdp x model, or replica x fsdp x model: peak of one "
        "device, and bytes that it sends in a step along each axis and in recomputation"
    )
    return [Table(title, heads, tuple(rows))]


def _mesh_text(row: dict[str, Any]) -> str:
    return " x ".join(str(size) for size in row["mesh"].values() if size > 1)


def _costs(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the peak, the FLOPs of a plan, and the bytes along each axis and of recomputation."""
    flops = f"{row['flops']:.3f}" if "flops" in row else ""
    rerun = sum(each["rerun_sent"] for each in row["collectives"])
    sent = [memory_text(n) if n else "" for n in (*(_sent(row, axis) for axis in AXES), rerun)]
    return (memory_text(row["peak"]), flops, *sent)


def _sent(row: dict[str, Any], axis: str) -> int:
    """Return the bytes sent along an axis, those that go along others too included.

    To another slice programs send through their hosts, and name no axis.
    """
    return sum(
        each["sent"]
        for each in row["collectives"]
        if axis in each["axes"] or (axis == "replica" and each["kind"] == "send")
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the targets and the batch."""
    add = parser.add_argument
    add("--targets", type=lambda text: text.split(","), default=["v5e:4x4", "h100:8"])
    add("--batch", type=at_least(1), default=4, help="sequences of each fsdp shard, default: 4")


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, keys=("rows",), platform="cpu"
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
