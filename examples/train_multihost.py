"""Train a byte-level GPT with several processes, on one machine or on many, each on its own text.

On one machine, two processes (with GPUs write `CUDA_VISIBLE_DEVICES=$i` before `python`):

    for i in 0 1; do
        python examples/train_multihost.py --coordinator localhost:9911 \\
            --num-processes 2 --process-id $i &
    done; wait

On many, one such line on each with the address of the first; under SLURM none of the options:

    srun python examples/train_multihost.py

A process alone uses all devices of its machine. --out must be on a file system that all share;
--resume continues from the last save there. All replicas keep bit-equal parameters.
"""

import functools
import pathlib
import zlib

import common
import jax
import numpy as np
from common import console
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from train_gpt import batch_at, read_text

import jrc
from jrc.models import gpt


def arguments(argv=None):
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--coordinator", help="host:port of process 0; not needed where a cluster sets it")
    add("--num-processes", type=int, help="processes in all")
    add("--process-id", type=int, help="which of them this is, from 0")
    add("--text", type=pathlib.Path, help="file or folder (none: the standard library's source)")
    common.add_options(
        parser, "runs/multihost", steps=200, batch=2, unit="sequences", replicas=None
    )
    add("--layers", type=int, default=2, help="blocks of the model")
    add("--width", type=int, default=128, help="size of the residual stream")
    add("--length", type=int, default=128, help="length of a sequence")
    return common.parse(parser, argv)


def join(options):
    """Join the other processes, if options or a cluster give their address."""
    given = options.coordinator, options.num_processes, options.process_id
    try:
        jax.distributed.initialize(*given)
    except ValueError as error:
        if given != (None, None, None):
            raise SystemExit(f"--coordinator, --num-processes, --process-id: {error}") from error
    console.quiet = not common.is_first()
    options.out.mkdir(parents=True, exist_ok=True)


def own_text(options):
    """Return this process's part of the text, and what identifies the whole text."""
    text = read_text(options.text)
    part = np.array_split(text, jax.process_count())[jax.process_index()]
    if len(part) < 2 * options.length:
        raise SystemExit(
            f"--text must have at least {2 * options.length} bytes a process for --length "
            f"{options.length}, got {len(part)}."
        )
    return part, {"text_bytes": len(text), "text_crc32": zlib.crc32(text)}


def report(history, replicas, size):
    losses = [s["loss"] for s in history["steps"]]
    sent = np.mean([s["bytes_sent"] for s in history["steps"]])
    dense = 2 * (replicas - 1) / replicas * 4 * size
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats/byte in {len(losses)} steps")
    console.print(f"{sent / 1e3:,.1f} kB sent per step and replica; dense {dense / 1e3:,.1f} kB")


def run(options):
    join(options)
    mesh = Mesh(jax.devices(), ("data",))
    text, text_is = own_text(options)
    config = gpt.Config(layers=options.layers, width=options.width, length=options.length)
    loss_fn = functools.partial(gpt.loss, config=config)
    params = gpt.init(jax.random.key(options.seed), config)  # the same on every process
    size = sum(x.size for x in jax.tree.leaves(params))

    tx = common.optimizer(options)
    state = jrc.init_state(params, tx, jax.random.key(options.seed + 1), mesh=mesh)
    step = jrc.make_train_step(jrc.recompute_segments(loss_fn, config.boundaries), tx, mesh=mesh)
    console.print(
        f"{size:,} parameters, {jax.process_count()} processes, {step.replicas} x "
        f"{jax.devices()[0].device_kind}, {'dense momentum SGD' if options.dense else 'DGC'}"
    )

    # A resumed run may have other addresses, but it must have as many processes.
    wanted = common.settings(options, "text", "coordinator", "num_processes", "process_id")
    wanted |= text_is | {"processes": jax.process_count(), "replicas": step.replicas}
    if options.resume:
        state, history = common.resume(options, state, wanted)
    else:
        history = common.start(options, None, wanted)

    whole = NamedSharding(mesh, PartitionSpec("data"))
    count = options.batch * len(mesh.local_devices)

    def batch_of(i):
        own = batch_at(text, i, count, options.length, options.seed, jax.process_index())
        return jax.make_array_from_process_local_data(whole, own)

    common.train(options, step, state, history, batch_of)
    report(history, step.replicas, size)
    console.print(f"Saved in {options.out}; --resume continues from there")
    return history


def main(argv=None):
    return common.main(run, arguments(argv), "train_multihost")


if __name__ == "__main__":
    main()
