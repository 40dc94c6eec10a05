"""The parts that the training examples share: options, optimizer, saves, the loop, the report.

Not run by itself; `train_gpt.py`, `train_resnet.py` and `train_multihost.py` import it.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import shutil
import signal
import time

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from pictures import memory, network
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jrc

WARM_UP = (0.75, 0.9375, 0.984375, 0.996, 0.999)
console = Console()


# ---------------------------------------------------------------- options


def add_options(parser, out, *, steps, batch, unit, replicas=4):
    """Add the options of every training example; `unit` is what a batch counts.

    Without `replicas` every device is one.
    """
    add = parser.add_argument
    add("--out", type=pathlib.Path, help=f"default {out}, with --dense {out}_dense")
    add("--dense", action="store_true", help="momentum SGD with a dense all-reduce")
    add("--resume", action="store_true", help="continue from the last save under --out")
    add("--steps", type=int, default=steps, help="steps in all")
    if replicas:
        add("--replicas", type=int, default=replicas, help="devices, simulated ones on a CPU")
    add("--batch", type=int, default=batch, help=f"{unit} per replica and step")
    add("--learning-rate", type=float, help="default 0.3, of AdamW 0.003")
    add("--rampup-step", type=int, default=100, help="steps of the compression's warm-up")
    add("--save-every", type=int, default=50, help="steps between two saves")
    add("--seed", type=int, default=0, help="of parameters and batches")
    parser.set_defaults(default_out=out)


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the commands of the docstring, and the default of every option that has one."""

    def _get_help_string(self, action):
        default = action.default
        if default is None or default is False or default is argparse.SUPPRESS:
            return action.help
        return f"{action.help or ''} (default: %(default)s)".strip()


def parser(doc):
    """Return a parser with the docstring of an example."""
    return argparse.ArgumentParser(description=doc, formatter_class=Help)


def parse(parser: argparse.ArgumentParser, argv, finish=lambda parser, options: None):
    """Return the options; `finish` is the example's own check of them."""
    options = parser.parse_args(argv)
    finish(parser, options)
    if options.seed < 0:
        parser.error(f"--seed must be a whole number >= 0, got {options.seed}.")
    check_positive(parser, options, "steps", "replicas", "batch", "rampup_step", "save_every")
    adamw = getattr(options, "optimizer", None) == "adamw"
    if options.learning_rate is None:
        options.learning_rate = 0.003 if adamw else 0.3
    way = getattr(options, "outer", None) or ("adamw" if adamw else "dense")
    out = options.default_out + (f"_{way}" if options.dense or way != "dense" else "")
    options.out = options.out or pathlib.Path(out)
    del options.default_out
    return options


def check_positive(parser, options, *names):
    """End with a message if one of these options is there and below one."""
    for name in names:
        if (value := getattr(options, name, 1)) < 1:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} must be a whole number >= 1, got {value}.")


def settings(options, *skip):
    """Return the options that must be equal to resume a run; `skip` names others that need not."""
    skip = ("resume", "out", "save_every", *skip)
    return {k: v for k, v in vars(options).items() if k not in skip}


# ---------------------------------------------------------------- training


def devices_and_mesh(options):
    # Must be set before JAX starts. Real devices are used where there are any.
    if jax.config.jax_num_cpu_devices != options.replicas:
        jax.config.update("jax_num_cpu_devices", options.replicas)
    devices = jax.devices()[: options.replicas]
    options.out.mkdir(parents=True, exist_ok=True)
    return devices, Mesh(devices, ("data",))


def optimizer(options, **more):
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, max(1, options.steps // 20), options.steps
    )
    if getattr(options, "optimizer", None) == "adamw":
        adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)
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
        **more,
    )


def peak_bytes(step, state, batch):
    """Return the bytes of one replica's compiled step, as XLA states them."""
    memory = step.memory(state, batch)
    return {
        "arguments": memory.arguments,
        "outputs": memory.outputs - memory.aliased,
        "temporaries": memory.temporaries,
        "peak": memory.peak,
    }


def write_json(path, value):
    """Write a file completely or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1))
    os.replace(new, path)


@contextlib.contextmanager
def delayed_interrupts():
    """Delay Ctrl-C until the block ends."""
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        raise KeyboardInterrupt


def is_first():
    """Return whether this process is the one that prints, and writes files other than saves."""
    return jax.process_index() == 0


def start(options, before, wanted):
    """Remove what an earlier run left in the folder, and return an empty history."""
    if is_first():
        shutil.rmtree(options.out / "state", ignore_errors=True)
        (options.out / "history.json").unlink(missing_ok=True)
    return {"settings": wanted, "before": before, "steps": []}


def saves(options):
    """Return the complete saves; an interrupted one has another name."""
    return [f for f in (options.out / "state").glob("jrc_*") if f.name[4:].isdigit()]


def recorded(options, wanted):
    """Return the history of the run that `--resume` continues, or stop with what is wrong."""
    if not saves(options):
        raise SystemExit(
            f"--resume: --out must have a save, got none in {options.out}. Run without it first."
        )
    history = json.loads((options.out / "history.json").read_text())
    made = history["settings"]
    if differ := [f"{k}={made.get(k)}" for k in wanted if made.get(k) != wanted[k]]:
        raise SystemExit(
            f"--resume: options must be those of the run in {options.out}, got others than "
            f"{', '.join(differ)}. Pass these."
        )
    return history


def resume(options, state, wanted):
    history = recorded(options, wanted)
    state = jrc.restore(options.out / "state", state)
    del history["steps"][int(state.step) :]
    return state, history


def progress_bar():
    """Return a bar of one line, which 80 columns hold."""
    columns = [
        BarColumn(8),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[ms]:,.0f} ms"),
        TextColumn("{task.fields[sent]}"),
        TextColumn("{task.fields[skipped]}"),
        TimeRemainingColumn(compact=True),
    ]
    return Progress(*columns, console=console)


def shown_of(loss, seconds, sent, density, skipped):
    """Return the fields of the bar after a step."""
    what = f"{network(sent)} sent, {100 * density:.3g} %" if sent else "nothing sent"
    return {
        "loss": loss,
        "ms": seconds * 1e3,
        "sent": what,
        "skipped": f"{skipped} skipped" if skipped else "",
    }


def train(options, step, state, history, batch_of, loss=math.nan):
    """Take the remaining steps; `batch_of(i)` is the batch of step i, `loss` is shown at first."""
    first = int(state.step)
    skipped = sum(step.get("skipped", False) for step in history["steps"])
    with progress_bar() as progress:
        shown = shown_of(loss, 0.0, 0.0, 1.0, skipped)
        task = progress.add_task("", total=options.steps, completed=first, **shown)
        for i in range(first, options.steps):
            began = time.perf_counter()
            state, info = step(state, batch_of(i))
            # With an outer optimizer `info.loss` is that of the last round.
            loss = float(info.loss if info.losses is None else np.mean(info.losses))
            sent = float(info.bytes_sent)
            seconds = time.perf_counter() - began
            aux = {name: float(np.mean(x)) for name, x in (info.aux or {}).items()}
            did = {"loss": loss, "bytes_sent": sent, "density": float(info.density)}
            did |= {"skipped": bool(info.skipped), "seconds": seconds}
            did |= {"synchronised": bool(info.synchronised)}
            history["steps"].append(did | aux)
            skipped += did["skipped"]
            shown = shown_of(loss, seconds, sent, did["density"], skipped)
            progress.update(task, advance=1, **shown)
            if (i + 1) % options.save_every == 0 or i + 1 == options.steps:
                # History first: `resume` drops its entries of steps after the save.
                with delayed_interrupts():
                    if is_first():
                        write_json(options.out / "history.json", history)
                    jrc.save(options.out / "state", state)
    return state


def compare_memory(lean, plain, state, batch):
    with console.status("compiling the step once more as the baseline, to compare memory"):
        return {
            "recomputed": peak_bytes(lean, state, batch),
            "plain": peak_bytes(plain, state, batch),
        }


def main(run, options, name):
    try:
        return run(options)
    except KeyboardInterrupt:
        what = (
            "--resume continues from the last save"
            if any(options.out.glob("**/state/jrc_*"))
            else "no save yet"
        )
        console.print(f"\nStopped; {options.out}: {what}")
        raise SystemExit(130) from None
    except ValueError as error:  # an impossible model, or a save of another one
        raise SystemExit(f"{name}: {error}") from error


# ---------------------------------------------------------------- report


def figures(history, replicas, params, memory, results):
    """Return the content of figures.json, with the `results` of this example."""
    sent = [s["bytes_sent"] for s in history["steps"]]
    sizes = [x.size for x in jax.tree.leaves(params)]
    return {
        "settings": history["settings"],
        "device": f"{replicas} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "parameters": sum(sizes),
        "largest_tensor": max(sizes),
        **results,
        "losses": [s["loss"] for s in history["steps"]],
        "bytes_sent": sent,
        "bytes_dense": 2 * (replicas - 1) / replicas * 4 * sum(sizes),
        "bytes_sent_mean": sum(sent) / len(sent),
        "bytes_sent_last": next((x for x in reversed(sent) if x), 0.0),
        "rounds": sum(s["synchronised"] for s in history["steps"]),
        "step_seconds_median": sorted(s["seconds"] for s in history["steps"])[len(sent) // 2],
        "memory": memory,
    }


def show(found, title, rows, recomputed="peak, blocks re-run"):
    """Print a table of these rows, then memory, network and time."""

    def against(sent):
        ratio = found["bytes_dense"] / sent if sent else 1.0
        return network(sent), f"1/{ratio:,.1f}"

    lean, plain = found["memory"]["recomputed"]["peak"], found["memory"]["plain"]["peak"]
    table = Table("", title=title)
    for head in ("", "of that without jrc"):  # numbers are never cut or broken
        table.add_column(head, no_wrap=True)
    rows = [
        *rows,
        ("peak of the compiled step, baseline", memory(plain), ""),
        (recomputed, memory(lean), f"1/{plain / lean:,.1f}"),
        ("dense all-reduce, per step and replica", network(found["bytes_dense"]), ""),
        ("sent, mean of all steps", *against(found["bytes_sent_mean"])),
        ("sent, last step that sent", *against(found["bytes_sent_last"])),
        ("median step", f"{found['step_seconds_median'] * 1e3:,.0f} ms", ""),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if why := why_dense(found):
        console.print(why)


def why_dense(found):
    """Return why a run that was to be compressed sent as much as a dense one, else nothing."""
    chosen = found["settings"]
    if chosen["dense"] or chosen.get("optimizer") == "adamw":
        return ""
    if not found["bytes_dense"]:
        return "Nothing was sent: one replica has nobody to send to."
    if found["bytes_sent_last"] < found["bytes_dense"]:
        return ""
    if chosen["steps"] <= chosen["rampup_step"] * (len(WARM_UP) - 1) // len(WARM_UP):
        return (
            f"Sent as much as dense, 1/1.0, because --steps {chosen['steps']} end in the warm-up "
            f"(--rampup-step {chosen['rampup_step']}). Its levels before the last are dense sums."
        )
    return (
        "Sent as much as dense, 1/1.0, because every tensor is below min_size and stays dense: "
        f"the largest has {found['largest_tensor']:,} entries. Train a larger model."
    )
