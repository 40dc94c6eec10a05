"""A day with a language model: explain, plan, train in a budget, resume, then four replicas.

    python examples/finetune_llm.py
    python examples/finetune_llm.py --resume         # after Ctrl-C: go on from the last save
    python examples/finetune_llm.py --target v5e:1   # plan for a TPU too: pip install '.[tpu]'
    python examples/finetune_llm.py --start runs/llm/params --text my_corpus/
    python examples/finetune_llm.py --model gemma    # Gemma's blocks: pip install '.[zoo-gemma]'

Trains a Llama-shaped model of flax nnx on bytes of real text. First one device trains it with
AdamW, in a step that fits the budget. Then replicas (simulated ones on a CPU) continue with the
same optimizer and exchange what they changed every `--sync-every` steps. Ends with a table, and
writes loss.png, memory.png, the plan, and the parameters for `--start`.
"""

import argparse
import dataclasses
import importlib.util
import pathlib
import shutil
import zlib

import common
import jax
import jax.numpy as jnp
import llama
import numpy as np
import optax
import pictures
from common import console
from jax.sharding import Mesh
from pictures import memory, network
from rich.table import Table
from train_gpt import batch_at, read_text, split_text

import jrc

PARTS = "one_device", "replicas"  # folders with saves of their own


def arguments(argv=None):
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--model", choices=("llama", "gemma"), default="llama", help="whose blocks")
    add("--start", type=pathlib.Path, help="parameters that an earlier run saved (none: random)")
    add("--text", type=pathlib.Path, help="file or folder (none: the standard library's source)")
    add("--budget", help="of the train step, such as 64MiB (none: three fifths of the temporaries)")
    add("--target", help="an accelerator to plan for as well, such as v5e:1")
    add("--out", type=pathlib.Path, default="runs/llm", help="folder of saves and pictures")
    add("--resume", action="store_true", help="go on from the last save under --out")
    add("--steps", type=int, default=60, help="steps on one device, and then on the replicas")
    add("--replicas", type=int, default=4, help="devices of the second part")
    add("--sync-every", type=int, default=15, help="local steps between two exchanges")
    add("--batch", type=int, default=4, help="sequences per replica and step")
    add("--length", type=int, default=128, help="bytes of a sequence")
    add("--layers", type=int, default=4, help="blocks of the model")
    add("--width", type=int, default=128, help="size of the residual stream")
    add("--learning-rate", type=float, default=0.003, help="of AdamW")
    add("--save-every", type=int, default=15, help="steps between two saves")
    add("--seed", type=int, default=0, help="of parameters and batches")
    options = parser.parse_args(argv)
    names = "steps", "replicas", "sync_every", "batch", "length", "layers", "save_every"
    common.check_positive(parser, options, *names)
    if options.width < 8 or options.width % 8:
        parser.error(f"--width must be a multiple of 8, got {options.width}.")
    if options.steps % options.sync_every:
        parser.error(
            f"--steps must be a multiple of --sync-every {options.sync_every}, got "
            f"{options.steps}. Steps behind the last exchange are in no shared parameters."
        )
    return options


# ---------------------------------------------------------------- model


def gemma(options):
    """Return loss and parameters of Gemma 3's blocks, as its package has them, on bytes."""
    if importlib.util.find_spec("gemma") is None:
        raise SystemExit("--model gemma needs a package: pip install '.[zoo-gemma]'")
    from gemma import gm

    config = gm.nn.Gemma3_270M.config
    config = dataclasses.replace(
        config,
        num_embed=256,
        embed_dim=options.width,
        hidden_dim=4 * options.width,
        head_dim=options.width // 4,
        attention_types=config.attention_types[-options.layers :],  # ends with global attention
    )
    model = gm.nn.Gemma3_270M(config=config, dtype=jnp.float32)

    def loss_fn(params, batch, key):
        del key
        return llama.cross_entropy(model.apply(params, batch[:, :-1]).logits, batch)

    params = model.init(jax.random.key(options.seed), jnp.zeros((1, options.length), jnp.int32))
    return loss_fn, params


def model_of(options):
    """Return `loss_fn(params, batch, key)` and the parameters to start from."""
    if options.model == "gemma":
        loss_fn, params = gemma(options)
    else:
        config = llama.Config(layers=options.layers, width=options.width)
        loss_fn, params = llama.llama(config, options.seed)
    return loss_fn, jrc.restore(options.start, params) if options.start else params


# ---------------------------------------------------------------- look and plan


def look(loss_fn, params, batch, key):
    """Print what the gradient needs; nothing is run."""
    report = jrc.explain(loss_fn, params, batch, key)
    console.print(f"\nThe gradient needs {memory(report.memory.peak)}. The largest parts:")
    for line, saved in list(report.by_line.items())[:3]:
        console.print(f"  {memory(saved)} saved at {line}")
    return report


def plan_here(options, loss_fn, args, report, budget):
    """Print the cheapest plan of the gradient that fits, draw it, and store it."""
    plan = jrc.plan(loss_fn, *args, budget=budget)
    console.print(f"\nThe plan for {budget}:\n{plan}", soft_wrap=True)
    (options.out / "plan.json").write_text(plan.to_json())
    if pictures.pyplot():
        lean = jrc.explain(plan.apply(loss_fn), *args)
        report.plot(options.out / "memory.png", lean, names=("baseline", "jrc.plan"))
    return plan


def plan_there(name, loss_fn, args, budget):
    """Plan for an accelerator that need not be there; shapes are enough."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    try:
        plan = jrc.plan(loss_fn, *shapes, budget=budget, target=name)
    except jrc.BudgetError as error:
        console.print(f"\nOn {name}: {error}", soft_wrap=True)
        return error.least_bytes
    except (ImportError, RuntimeError) as error:  # the compiler is not installed
        raise SystemExit(f"--target {name}: {error}") from error
    console.print(f"\nThe plan for {budget} on {name}:\n{plan}", soft_wrap=True)
    return plan.verified.peak_bytes


# ---------------------------------------------------------------- train


def optimizer(options):
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, max(1, options.steps // 10), 2 * options.steps
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))


def train(options, part, step, state, batch_of, before, wanted):
    """Take the steps of a part, with saves of its own; with `--resume`, those that are left."""
    own = argparse.Namespace(**{**vars(options), "out": options.out / part})
    own.out.mkdir(parents=True, exist_ok=True)
    if options.resume and common.saves(own):
        state, history = common.resume(own, state, wanted)
    else:
        history = common.start(own, before, wanted)
    return common.train(own, step, state, history, batch_of, before), history


def run(options):
    if jax.config.jax_num_cpu_devices < options.replicas:
        jax.config.update("jax_num_cpu_devices", options.replicas)  # before JAX starts
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        for part in PARTS:  # what an earlier run left
            shutil.rmtree(options.out / part, ignore_errors=True)
    text = read_text(options.text)
    learned, held_out = split_text(text, options.length)
    loss_fn, params = model_of(options)
    size = sum(x.size for x in jax.tree.leaves(params))
    console.print(f"{size:,} parameters, {len(learned):,} bytes of text")

    def batches(replicas):
        count = replicas * options.batch
        return lambda i: batch_at(learned, i, count, options.length, options.seed, replicas)

    args = params, batches(1)(0), jax.random.key(0)
    report = look(loss_fn, *args)
    needs = report.memory
    budget = options.budget or f"{(needs.peak - needs.temporaries * 2 // 5) // 1024}KiB"
    plan = plan_here(options, loss_fn, args, report, budget)
    peaks = {"baseline": report.memory.peak, "jrc.plan": plan.verified.peak_bytes}
    if options.target:
        peaks[f"jrc.plan on {options.target}"] = plan_there(options.target, loss_fn, args, budget)

    tests = [batch_at(held_out, i, 8, options.length, options.seed) for i in range(4)]
    loss_of = jax.jit(lambda params, batch: loss_fn(params, batch, None))
    evaluate = lambda params: float(np.mean([loss_of(params, b) for b in tests]))  # noqa: E731
    losses = {"before": evaluate(params)}
    wanted = {k: str(v) for k, v in common.settings(options, "text", "target").items()}
    wanted |= {"text_crc32": zlib.crc32(text)}

    # One device: optimizer state and update are part of the budget.
    tx, key = optimizer(options), jax.random.key(options.seed + 1)
    alone = Mesh(jax.devices()[:1], ("data",))
    state = jrc.init_state(params, tx, key, mesh=alone)
    step = jrc.make_train_step(loss_fn, tx, mesh=alone, memory_budget=budget)
    peaks["train step, AdamW included"] = step.memory(state, batches(1)(0)).peak
    state, first = train(options, PARTS[0], step, state, batches(1), losses["before"], wanted)
    params = jax.device_get(state.params)
    losses["one device"] = evaluate(params)

    # Replicas: the same optimizer, and few exchanges.
    outer = jrc.SparseLoCo(sync_every=options.sync_every)
    mesh = Mesh(jax.devices()[: options.replicas], ("data",))
    state = jrc.init_state(params, tx, key, mesh=mesh, outer=outer)
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh, outer=outer, plan=plan)
    state, second = train(
        options, PARTS[1], step, state, batches(options.replicas), losses["one device"], wanted
    )
    params = jax.device_get(state.params)
    losses[f"{options.replicas} replicas"] = evaluate(params)
    jrc.save(options.out / "params", params)

    sent = sum(s["bytes_sent"] for s in second["steps"])
    dense = 2 * (options.replicas - 1) / options.replicas * 4 * size * options.steps
    histories = [[s["loss"] for s in part["steps"]] for part in (first, second)]
    found = {"peaks": peaks, "losses": losses, "sent": sent, "dense": dense}
    show(found, budget, options)
    plot(histories, losses, options.out / "loss.png")
    written = f"Written to {options.out}: params/, plan.json, loss.png, memory.png"
    console.print(written)
    return found | {"histories": histories}


# ---------------------------------------------------------------- report


def show(found, budget, options):
    title = f"A budget of {budget}, then {options.replicas} replicas"
    table = Table(show_header=False, title=title)
    for name, peak in found["peaks"].items():
        table.add_row(f"peak, {name}", memory(peak))
    for name, loss in found["losses"].items():
        table.add_row(f"held-out loss, {name}", f"{loss:.3f} nats/byte")
    table.add_row("sent by a replica", network(found["sent"]))
    table.add_row(
        "of dense gradients", f"1/{found['dense'] / found['sent']:,.1f}" if found["sent"] else ""
    )
    console.print(table)


def plot(histories, losses, path):
    def panel(axes):
        start = 0
        for name, values, colour in zip(("one device", "replicas"), histories,
                                        (pictures.BLUE, pictures.GREEN), strict=True):  # fmt: skip
            axes.plot(range(start, start + len(values)), values, color=colour, label=name)
            start += len(values)
        ends = [0, len(histories[0]), start]
        axes.plot(ends, list(losses.values()), "o", color=pictures.RED, label="held out")
        axes.set(xlabel="step", ylabel="loss, nats per byte")
        axes.legend()

    pictures.draw(path, "One device, then replicas that exchange seldom", [panel], (8, 4.4))


if __name__ == "__main__":
    common.main(run, arguments(), "finetune_llm")
