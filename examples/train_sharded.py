"""Train a byte-level GPT on split replicas: FSDP and tensors inside, compression between them.

    python examples/train_sharded.py                  # 2 x 2 x 2 devices; simulated ones on a CPU
    python examples/train_sharded.py --dense          # an uncompressed all-reduce between replicas
    python examples/train_sharded.py --outer diloco   # AdamW, and an exchange every 5 steps
    python examples/train_sharded.py --budget 0.2     # a leaner plan of recomputation

Each of the two replicas is split over four devices. The first step makes a plan of recomputation
that fits the budget. Ends with a table of the memory of one device and the bytes that it sends.
"""

import functools
import pathlib

import common
import jax
import optax
from common import console
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pictures import memory, network
from rich.table import Table
from train_gpt import batch_at, read_text, split_text

import jrc
from jrc.models import gpt

AXES = ("replica", "fsdp", "model")
OUTER = {"sparseloco": jrc.SparseLoCo, "diloco": jrc.DiLoCo}


def arguments(argv=None):
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--text", type=pathlib.Path, help="file or folder (none: the standard library's source)")
    add("--mesh", type=int, nargs=3, default=(2, 2, 2), help="sizes of replica, fsdp and model")
    add("--dense", action="store_true", help="momentum SGD with a dense all-reduce")
    add("--outer", choices=OUTER, help="AdamW, and an exchange every --sync-every steps")
    add("--sync-every", type=int, default=5, help="steps of a round, with --outer")
    add("--budget", type=float, default=0.5, help="share of the range of memory, from 0 to 1")
    add("--steps", type=int, default=60, help="steps of training")
    add("--batch", type=int, default=4, help="sequences per replica and step")
    add("--learning-rate", type=float, help="where not given 0.3, with --outer 0.003")
    add("--layers", type=int, default=4, help="blocks of the model")
    add("--width", type=int, default=128, help="size of the residual stream")
    add("--heads", type=int, default=4, help="attention heads, a divisor of --width")
    add("--length", type=int, default=128, help="length of a sequence")
    add("--seed", type=int, default=0, help="of parameters and batches")
    options = parser.parse_args(argv)
    if options.outer and options.dense:
        parser.error("--dense must not be given with --outer, got both. Leave one of them out.")
    if options.learning_rate is None:
        options.learning_rate = 0.003 if options.outer else 0.3
    return options


def mesh_of(sizes):
    """Return the mesh over real devices, or over simulated ones if there are fewer."""
    count = sizes[0] * sizes[1] * sizes[2]
    if jax.config.jax_num_cpu_devices < count:
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def spec_of(path, leaf):
    """Return how a parameter is split inside of a replica; vectors are whole.

    Tables of the vocabulary are split along the width, over all axes inside of a replica: XLA's
    partitioner may abort at other lookups (docs/meshes.md).
    """
    name = jax.tree_util.keystr(path)
    if leaf.ndim < 2:
        return P()
    if "tokens" in name or "positions" in name:
        return P(None, ("fsdp", "model"))
    if "head" in name:
        return P(("fsdp", "model"))
    return P("model", "fsdp") if "out" in name or "down" in name else P("fsdp", "model")


def optimizer(options):
    if options.outer:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(options.learning_rate))
    if options.dense:
        return optax.sgd(options.learning_rate, momentum=0.9)
    return jrc.dgc_momentum(
        options.learning_rate,
        momentum=0.9,
        rampup_begin_step=0,
        rampup_step=max(1, options.steps // 3),
        sparsity=(0.75, 0.9375, 0.99),
        local_grad_clip_norm=1.0,
        axis_name="replica",
    )


def run(options):
    mesh = mesh_of(options.mesh)
    config = gpt.Config(
        layers=options.layers, heads=options.heads, width=options.width, length=options.length
    )
    train_text, _ = split_text(read_text(options.text), options.length)
    params = jax.tree.map_with_path(
        lambda path, x: jax.device_put(x, NamedSharding(mesh, spec_of(path, x))),
        gpt.init(jax.random.key(options.seed), config),
    )
    tx, key = optimizer(options), jax.random.key(options.seed + 1)
    outer = OUTER[options.outer](options.sync_every) if options.outer else None
    state = jrc.init_state(params, tx, key, mesh=mesh, axis_name="replica", outer=outer)
    step = jrc.make_train_step(
        functools.partial(gpt.loss, config=config),
        tx,
        mesh=mesh,
        axis_name="replica",
        memory_budget=options.budget,
        outer=outer,
    )
    rows = NamedSharding(mesh, P(("replica", "fsdp")))
    losses, sent = [], 0.0
    for i in range(options.steps):
        count = options.batch * options.mesh[0]
        batch = batch_at(train_text, i, count, options.length, options.seed)
        state, info = step(state, jax.device_put(batch, rows))
        # An inner step has the losses of the replicas, and exchanges nothing.
        losses.append(float(info.loss if outer is None else info.losses.mean()))
        sent = max(sent, float(info.bytes_sent))
    found = {
        "losses": losses,
        "bytes_sent": sent if options.outer else float(info.bytes_sent),
        "peak_bytes": step.plan.verified.peak_bytes,
        "parameter_bytes": sum(x.nbytes for x in jax.tree.leaves(state.params)),
        "parameter_bytes_on_a_device": sum(
            x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params)
        ),
    }
    show(found, options)
    return found


def show(found, options):
    table = Table("", "", title=f"GPT on {dict(zip(AXES, options.mesh, strict=True))}")
    table.add_row("loss, first step", f"{found['losses'][0]:.3f} nats/byte")
    table.add_row("loss, last step", f"{found['losses'][-1]:.3f} nats/byte")
    for name in ("parameter_bytes", "parameter_bytes_on_a_device", "peak_bytes"):
        table.add_row(name.replace("_", " "), memory(found[name]))
    table.add_row(
        "bytes sent in a round" if options.outer else "bytes sent", network(found["bytes_sent"])
    )
    console.print(table)


def main(argv=None):
    return run(arguments(argv))


if __name__ == "__main__":
    main()
