"""Train a byte-level GPT on real text, with recomputation and deep gradient compression.

    python examples/train_gpt.py                    # four replicas; simulated ones on a CPU
    python examples/train_gpt.py --dense            # the same with an uncompressed all-reduce
    python examples/train_gpt.py --resume           # go on from the last save
    python examples/train_gpt.py --text my_corpus/  # any folder or file

Ends with a table, and writes figures.json, loss.png and memory.png under --out.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import sysconfig
import time
import zlib

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jrc
from jrc.models import gpt

WARM_UP = (0.75, 0.9375, 0.984375, 0.996, 0.999)
console = Console()


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--text", type=pathlib.Path, help="file or folder (default: the standard library's source)")
    add("--out", type=pathlib.Path, help="default runs/gpt, with --dense runs/gpt_dense")
    add("--dense", action="store_true", help="momentum SGD with a dense all-reduce")
    add("--resume", action="store_true", help="go on from the last save under --out")
    add("--steps", type=int, default=400)
    add("--replicas", type=int, default=4)
    add("--batch", type=int, default=2, help="sequences per replica and step")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--length", type=int, default=256)
    add("--learning-rate", type=float, default=0.3)
    add("--rampup-step", type=int, default=100, help="steps of the compression's warm-up")
    add("--save-every", type=int, default=50)
    add("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.seed < 0:
        parser.error(f"--seed is not negative; got {options.seed}")
    for name in ("steps", "replicas", "batch", "rampup_step", "save_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1; got {getattr(options, name)}")
    options.out = options.out or pathlib.Path("runs/gpt_dense" if options.dense else "runs/gpt")
    return options


# ---------------------------------------------------------------- text


def read_text(path):
    """The bytes of all text under `path`, in an order that depends on file names alone."""
    root = path or pathlib.Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise SystemExit(f"--text {root}: no such file or folder")
    pattern = "**/*" if path else "*.py"
    files = [root] if root.is_file() else sorted(f for f in root.glob(pattern) if f.is_file())
    data = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)
    return data


def split_text(data, length):
    """Held-out text is the last tenth: other files than those trained on."""
    cut = len(data) * 9 // 10
    if len(data) - cut < 2 * length:
        raise SystemExit(f"the text has {len(data)} bytes; --length {length} needs {20 * length}")
    return data[:cut], data[cut:]


def batch_at(data, step, count, length, seed):
    """The batch of a step depends on seed and step alone, so that a resumed run sees the same."""
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - length, count)
    return np.stack([data[s : s + length + 1] for s in starts]).astype(np.int32)


# ---------------------------------------------------------------- training


def optimizer(options):
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, max(1, options.steps // 20), options.steps
    )
    if options.dense:
        return optax.sgd(rate, momentum=0.9)
    return jrc.dgc_momentum(
        rate,
        momentum=0.9,
        rampup_begin_step=0,
        rampup_step=options.rampup_step,
        sparsity=WARM_UP,
        local_grad_clip_norm=1.0,
        axis_name="data",
    )


def peak_bytes(step, state, batch):
    """Bytes of one replica's compiled step, as XLA states them."""
    memory = step.lower(state, batch).compile().memory_analysis()
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    return parts | {"peak": sum(parts.values())}


def write_json(path, value):
    """Write all of a file or nothing."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1))
    os.replace(new, path)


def settings(options, data):
    """What must be equal for a run to be resumed, the text included."""
    skip = ("resume", "out", "save_every", "text")
    same = {k: v for k, v in vars(options).items() if k not in skip}
    return same | {"text_bytes": len(data), "text_crc32": zlib.crc32(data)}


@contextlib.contextmanager
def interrupts_wait():
    """Ctrl-C counts, but only afterwards."""
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        raise KeyboardInterrupt


def start_anew(options, before, wanted):
    """What an earlier run left in the folder must not be taken for this one's."""
    shutil.rmtree(options.out / "state", ignore_errors=True)
    (options.out / "history.json").unlink(missing_ok=True)
    return {"settings": wanted, "before": before, "steps": []}


def saves(options):
    """The whole saves; one that was broken off has another name."""
    return [f for f in (options.out / "state").glob("jrc_*") if f.name[4:].isdigit()]


def resume(options, state, wanted):
    if not saves(options):
        raise SystemExit(f"--resume: nothing to resume in {options.out}; run without it first")
    history = json.loads((options.out / "history.json").read_text())
    made = history["settings"]
    if differ := [f"{k}={made.get(k)}" for k in wanted if made.get(k) != wanted[k]]:
        raise SystemExit(f"--resume: {options.out} was made with {', '.join(differ)}")
    state = jrc.restore(options.out / "state", state)
    del history["steps"][int(state.step) :]
    return state, history


def train(options, step, state, history, data):
    columns = [
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[ms]:.0f} ms/step"),
        TextColumn("{task.fields[kb]:,.0f} kB sent"),
        TimeRemainingColumn(),
    ]
    count = step.replicas * options.batch
    first = int(state.step)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            "", total=options.steps, completed=first, loss=history["before"], ms=0.0, kb=0.0
        )
        for i in range(first, options.steps):
            began = time.perf_counter()
            batch = batch_at(data, i, count, options.length, options.seed)
            state, info = step(state, batch)
            loss, sent = float(info.loss), float(info.bytes_sent)
            seconds = time.perf_counter() - began
            history["steps"].append({"loss": loss, "bytes_sent": sent, "seconds": seconds})
            progress.update(task, advance=1, loss=loss, ms=seconds * 1e3, kb=sent / 1e3)
            if (i + 1) % options.save_every == 0 or i + 1 == options.steps:
                # History first: what it says of steps after the saved one is dropped on resuming.
                with interrupts_wait():
                    write_json(options.out / "history.json", history)
                    jrc.save(options.out / "state", state)
    return state


# ---------------------------------------------------------------- report


def figures(history, after, memory, replicas, params):
    sent = [s["bytes_sent"] for s in history["steps"]]
    dense = 2 * (replicas - 1) / replicas * 4 * params
    return {
        "settings": history["settings"],
        "device": f"{replicas} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "parameters": params,
        "held_out_before": history["before"],
        "held_out_after": after,
        "losses": [s["loss"] for s in history["steps"]],
        "bytes_sent": sent,
        "bytes_dense": dense,
        "bytes_sent_mean": sum(sent) / len(sent),
        "bytes_sent_last": sent[-1],
        "step_seconds_median": sorted(s["seconds"] for s in history["steps"])[len(sent) // 2],
        "memory": memory,
    }


def show(found):
    def against(bytes_sent):
        ratio = found["bytes_dense"] / bytes_sent if bytes_sent else 1.0
        return f"{bytes_sent / 1e3:,.1f} kB", f"1/{ratio:,.1f}"

    lean, plain = found["memory"]["recomputed"]["peak"], found["memory"]["plain"]["peak"]
    table = Table("", "", "of that without jrc", title="Byte-level GPT on real text")
    rows = [
        ("held-out loss before", f"{found['held_out_before']:.3f} nats/byte", ""),
        ("held-out loss after", f"{found['held_out_after']:.3f} nats/byte", ""),
        ("peak of the compiled step, nothing re-run", f"{plain / 2**20:,.1f} MiB", ""),
        ("peak, blocks re-run", f"{lean / 2**20:,.1f} MiB", f"1/{plain / lean:,.1f}"),
        ("dense all-reduce, per step and replica", f"{found['bytes_dense'] / 1e3:,.1f} kB", ""),
        ("sent, mean of all steps", *against(found["bytes_sent_mean"])),
        ("sent, last step", *against(found["bytes_sent_last"])),
        ("median step", f"{found['step_seconds_median'] * 1e3:,.0f} ms", ""),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def plot(found, out):
    try:
        import matplotlib
    except ImportError:
        console.print("matplotlib is missing, no PNGs: pip install 'jrc[plot]'")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    losses = np.asarray(found["losses"])
    left.plot(losses, color="0.8", label="training, each step")
    window = max(1, len(losses) // 30)
    smooth = np.convolve(losses, np.ones(window) / window, "valid")
    left.plot(np.arange(len(smooth)) + window - 1, smooth, color="C0", label=f"mean of {window}")
    ends = (found["held_out_before"], found["held_out_after"])
    left.plot([0, len(losses) - 1], ends, "o", color="C3", label="held out")
    left.set(xlabel="step", ylabel="loss, nats per byte", title="Loss")
    left.legend()
    right.step(range(len(losses)), found["bytes_sent"], where="post", label="sent")
    right.axhline(found["bytes_dense"], color="C3", ls="--", label="dense all-reduce")
    right.set(yscale="log", xlabel="step", ylabel="bytes per step and replica", title="Network")
    right.legend()
    figure.savefig(out / "loss.png", dpi=120)
    plt.close(figure)

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    names = {"plain": "nothing re-run", "recomputed": "blocks re-run"}
    start = np.zeros(2)
    for part in ("arguments", "outputs", "temporaries"):
        sizes = np.array([found["memory"][name][part] for name in names]) / 2**20
        axes.barh(list(names.values()), sizes, left=start, label=part)
        start += sizes
    for y, total in enumerate(start):
        axes.text(total, y, f" {total:,.1f} MiB", va="center")
    axes.set(xlabel="MiB per replica, as XLA states them", title="Peak of the compiled step")
    axes.margins(x=0.15)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(out / "memory.png", dpi=120)
    plt.close(figure)


def run(options):
    # Asked for before JAX starts; where there are real devices, those are used.
    jax.config.update("jax_num_cpu_devices", options.replicas)
    devices = jax.devices()[: options.replicas]
    mesh = Mesh(devices, ("data",))
    options.out.mkdir(parents=True, exist_ok=True)

    config = gpt.Config(
        layers=options.layers, heads=options.heads, width=options.width, length=options.length
    )
    text = read_text(options.text)
    wanted = settings(options, text)
    train_text, held_out = split_text(text, options.length)
    loss_fn = functools.partial(gpt.loss, config=config)
    tx = optimizer(options)
    params = gpt.init(jax.random.key(options.seed), config)
    size = sum(x.size for x in jax.tree.leaves(params))
    state = jrc.init_state(params, tx, jax.random.key(options.seed + 1), mesh=mesh)
    lean = jrc.recompute_segments(loss_fn, config.boundaries)
    step = jrc.make_train_step(lean, tx, mesh=mesh)
    console.print(
        f"{size:,} parameters, {len(train_text):,} bytes of text, {len(devices)} x "
        f"{devices[0].device_kind}, {'dense momentum SGD' if options.dense else 'DGC'}"
    )

    tests = [batch_at(held_out, i, 8, options.length, options.seed) for i in range(8)]
    held_out_loss = jax.jit(lambda params, batch: loss_fn(params, batch, None))
    evaluate = lambda params: float(np.mean([held_out_loss(params, b) for b in tests]))  # noqa: E731

    if options.resume:
        state, history = resume(options, state, wanted)
    else:
        history = start_anew(options, evaluate(params), wanted)
    state = train(options, step, state, history, train_text)

    batch = batch_at(train_text, 0, step.replicas * options.batch, options.length, options.seed)
    with console.status("compiling the step once more with nothing re-run, to compare memory"):
        memory = {
            "recomputed": peak_bytes(step, state, batch),
            "plain": peak_bytes(jrc.make_train_step(loss_fn, tx, mesh=mesh), state, batch),
        }
    after = evaluate(jax.device_get(state.params))
    found = figures(history, after, memory, step.replicas, size)
    write_json(options.out / "figures.json", found)
    plot(found, options.out)
    show(found)
    console.print(f"Written to {options.out}: figures.json, loss.png, memory.png")
    return found


def main(argv=None):
    options = arguments(argv)
    try:
        return run(options)
    except KeyboardInterrupt:
        again = "the last save is whole: go on with --resume" if saves(options) else "no save yet"
        console.print(f"\nStopped; {options.out}: {again}")
        raise SystemExit(130) from None
    except ValueError as error:  # a model that cannot be, a save that does not fit
        raise SystemExit(f"train_gpt: {error}") from error


if __name__ == "__main__":
    main()
