"""Train a byte-level GPT on real text, within a memory budget and with few bytes on the network.

    python examples/train_gpt.py                    # four replicas; simulated ones on a CPU
    python examples/train_gpt.py --dense            # the same with an uncompressed all-reduce
    python examples/train_gpt.py --optimizer adamw  # AdamW with an uncompressed all-reduce
    python examples/train_gpt.py --outer sparseloco # AdamW; replicas exchange every 15 steps
    python examples/train_gpt.py --outer diloco     # the same, all entries, with outer momentum
    python examples/train_gpt.py --budget 16MiB     # for a replica's gradient; 1.0 re-runs nothing
    python examples/train_gpt.py --resume           # continue from the last save
    python examples/train_gpt.py --text my_corpus/  # any folder or file

Ends with a table, and writes figures.json, loss.png and memory.png under --out.
"""

import argparse
import functools
import pathlib
import sysconfig
import zlib

import common
import jax
import numpy as np
import pictures
from common import console

import jrc
from jrc.models import gpt

OUTER = {"sparseloco": jrc.SparseLoCo, "diloco": jrc.DiLoCo}


def arguments(argv=None):
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--text", type=pathlib.Path, help="file or folder (none: the standard library's source)")
    common.add_options(parser, "runs/gpt", steps=300, batch=2, unit="sequences")
    add("--optimizer", choices=("sgd", "adamw"), help="sgd, or with --outer adamw, where not given")
    add("--outer", choices=OUTER, help="local steps, and an exchange every --sync-every of them")
    add("--sync-every", type=int, default=15, help="local steps of a round")
    add("--fragments", type=int, default=1, help="parts of the parameters with steps of their own")
    add("--overlap", action="store_true", help="exchange while the next step is computed")
    add("--budget", type=budget, default=0.25, help="of a replica's gradient: bytes, 16MiB, or a "
        "fraction between the least peak (0.0) and that of the baseline (1.0)")  # fmt: skip
    add("--layers", type=int, default=4, help="blocks of the model")
    add("--width", type=int, default=128, help="size of the residual stream")
    add("--heads", type=int, default=4, help="attention heads, a divisor of --width")
    add("--length", type=int, default=256, help="bytes of a sequence")
    return common.parse(parser, argv, finish)


def budget(text):
    """Return a fraction for a number with a point, else the text, which is a size."""
    if text in ("0", "1"):
        raise argparse.ArgumentTypeError(f"write {text}.0 for the fraction, got {text}")
    return float(text) if "." in text and text.replace(".", "").isdigit() else text


def finish(parser, options):
    """Put in what depends on other options, and refuse those that do not go together."""
    options.optimizer = options.optimizer or ("adamw" if options.outer else "sgd")
    if options.sync_every < 1:
        parser.error(f"--sync-every must be a whole number >= 1, got {options.sync_every}.")
    if not 1 <= options.fragments <= options.sync_every:
        parser.error(
            "--fragments must be a whole number from 1 to --sync-every, got "
            f"{options.fragments}. Write --fragments 3."
        )
    if options.overlap and 2 * options.fragments > options.sync_every:
        parser.error("--sync-every must be at least twice --fragments with --overlap.")
    if not options.outer and (options.fragments > 1 or options.overlap):
        parser.error("--fragments and --overlap must be given with --outer, got none of it.")
    if options.outer and options.dense:
        parser.error("--dense must not be given with --outer, got both. Leave one of them out.")


# ---------------------------------------------------------------- text


def read_text(path):
    """Return the bytes of all text under `path`, in the order of the file names."""
    root = path or pathlib.Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise SystemExit(f"--text must be a file or folder, got {root}, which does not exist.")
    pattern = "**/*" if path else "*.py"
    files = [root] if root.is_file() else sorted(f for f in root.glob(pattern) if f.is_file())
    data = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)
    return data


def split_text(data, length):
    """Split off the last tenth, which is of other files, as held-out text."""
    cut = len(data) * 9 // 10
    if len(data) - cut < 2 * length:
        raise SystemExit(
            f"--text must have at least {20 * length} bytes for --length {length}, got {len(data)}."
        )
    return data[:cut], data[cut:]


def batch_at(data, step, count, length, *seed):
    """Return the batch of a step; it depends on seed and step alone, in resumed runs too."""
    starts = np.random.default_rng((*seed, step)).integers(0, len(data) - length, count)
    return np.stack([data[s : s + length + 1] for s in starts]).astype(np.int32)


# ---------------------------------------------------------------- report


def show(found):
    rows = [
        ("held-out loss before", f"{found['held_out_before']:.3f} nats/byte", ""),
        ("held-out loss after", f"{found['held_out_after']:.3f} nats/byte", ""),
    ]
    common.show(found, "Byte-level GPT on real text", rows, "peak, with the plan")


def plot(found, out):
    def losses(axes):
        held_out = (found["held_out_before"], found["held_out_after"])
        pictures.smooth(axes, np.asarray(found["losses"]), "training, each step", held_out=held_out)
        axes.set(ylabel="loss, nats per byte", title="Loss")

    title = f"Byte-level GPT, {found['device']}"
    pictures.training(out / "loss.png", title, found, [losses])
    peaks = functools.partial(pictures.peaks, found=found, recomputed="with the plan")
    pictures.draw(out / "memory.png", "Peak of the compiled step", [peaks], (9, 3.4))


def outer_of(options):
    if options.outer is None:
        return None
    make, overlap = OUTER[options.outer], int(options.overlap)
    return make(options.sync_every, fragments=options.fragments, overlap=overlap)


def way(options, outer):
    if outer or options.optimizer == "adamw":
        return f"AdamW, {outer}" if outer else "dense AdamW"
    return "dense momentum SGD" if options.dense else "DGC"


def run(options):
    devices, mesh = common.devices_and_mesh(options)
    config = gpt.Config(
        layers=options.layers, heads=options.heads, width=options.width, length=options.length
    )
    text = read_text(options.text)
    # A resumed run must have equal options and the same text.
    wanted = common.settings(options, "text")
    wanted |= {"text_bytes": len(text), "text_crc32": zlib.crc32(text)}
    if options.resume:
        common.recorded(options, wanted)  # before a plan is made
    train_text, held_out = split_text(text, options.length)
    loss_fn = functools.partial(gpt.loss, config=config)
    tx = common.optimizer(options)
    outer = outer_of(options)
    params = gpt.init(jax.random.key(options.seed), config)
    key = jax.random.key(options.seed + 1)
    # Of one replica's part of a batch. A resumed run finds the plan in the folder.
    example = batch_at(train_text, 0, options.batch, options.length, options.seed)
    plan = jrc.plan(
        loss_fn, params, example, key, budget=options.budget, cache=options.out / "plans"
    )
    size = sum(x.size for x in jax.tree.leaves(params))
    state = jrc.init_state(params, tx, key, mesh=mesh, outer=outer)
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh, outer=outer, plan=plan)
    console.print(
        f"{size:,} parameters, {len(train_text):,} bytes of text, {len(devices)} x "
        f"{devices[0].device_kind}, {way(options, outer)}"
    )
    console.print(
        f"Plan: {pictures.memory(plan.verified.peak_bytes)} for a replica's gradient, "
        f"{plan.verified.flops_ratio:.3f} x the FLOPs"
    )

    tests = [batch_at(held_out, i, 8, options.length, options.seed) for i in range(8)]
    held_out_loss = jax.jit(lambda params, batch: loss_fn(params, batch, None))
    evaluate = lambda params: float(np.mean([held_out_loss(params, b) for b in tests]))  # noqa: E731

    if options.resume:
        state, history = common.resume(options, state, wanted)
    else:
        history = common.start(options, evaluate(params), wanted)
    count = step.replicas * options.batch
    batch_of = lambda i: batch_at(train_text, i, count, options.length, options.seed)  # noqa: E731
    state = common.train(options, step, state, history, batch_of, history["before"])

    plain = jrc.make_train_step(loss_fn, tx, mesh=mesh, outer=outer)
    memory = common.compare_memory(step, plain, state, batch_of(0))
    after = evaluate(jax.device_get(state.params))
    results = {"held_out_before": history["before"], "held_out_after": after}
    found = common.figures(history, step.replicas, params, memory, results)
    common.write_json(options.out / "figures.json", found)
    plot(found, options.out)
    show(found)
    console.print(f"Written to {options.out}: figures.json, loss.png, memory.png")
    return found


def main(argv=None):
    return common.main(run, arguments(argv), "train_gpt")


if __name__ == "__main__":
    main()
