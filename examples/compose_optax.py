"""Put deep gradient compression into an existing optax chain.

    python examples/compose_optax.py
    python examples/compose_optax.py --steps 200

Trains a small GPT on four replicas (simulated ones on a CPU) in six ways: without compression, and
with it beside gradient clipping, weight decay, a schedule, injected hyperparameters, gradient
accumulation and masks. `jrc.scale_by_dgc` takes the place of momentum and of the all-reduce.
"""

import argparse
import functools
import pathlib

import common
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import jrc
from jrc.models import gpt


def batches_of(steps, size, length):
    """Return bytes of real text, int32 (steps, size, length + 1): argparse's own source."""
    text = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - length, (steps, size))
    return text[starts[..., None] + np.arange(length + 1)]


# Only transforms without state may come before the compression; this one clips local gradients.
CLIP = optax.clip_by_global_norm(1.0)


def compression():
    """Return momentum SGD that sends the largest hundredth of each large tensor's entries."""
    return jrc.scale_by_dgc(0.9, sparsity=0.99, min_size=1024, axis_name="data")


def descent(rate, *direction):
    """Return a chain that adds weight decay and the learning rate to a direction."""
    return optax.chain(
        *direction, optax.add_decayed_weights(1e-4), optax.scale_by_learning_rate(rate)
    )


def is_product(path, leaf):
    """Return whether a parameter is the matrix of a block, not a norm, bias or embedding."""
    del leaf
    return path[0].key.startswith("block") and path[-1].key == "w"


def only_products(params):
    """Compress the matrices; all others have ordinary momentum of the mean gradient.

    Local gradients must be clipped inside the mask. Outside, the others would be scaled by a norm
    that differs between replicas, and the replicas would drift apart.
    """
    products = jax.tree_util.tree_map_with_path(is_product, params)
    others = jax.tree.map(lambda product: not product, products)
    return optax.chain(
        optax.masked(optax.chain(CLIP, compression()), products),
        optax.masked(optax.chain(CLIP, optax.trace(0.9)), others),
    )


def variants(params, steps):
    """Return name, optimizer and options of the train step."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, max(1, steps // 10), steps)
    dense = descent(rate, CLIP, optax.trace(0.9))
    sparse = descent(rate, CLIP, compression())
    # The rate is then part of the state and can be read or changed between two steps.
    injected = optax.inject_hyperparams(lambda rate: descent(rate, CLIP, compression()))(rate)
    gathered = optax.MultiSteps(sparse, every_k_schedule=2).gradient_transformation()
    return [
        ("no compression", dense, {}),
        ("DGC instead of momentum", sparse, {}),
        ("  inject_hyperparams", injected, {}),
        ("  masked: matrices of blocks only", descent(rate, only_products(params)), {}),
        ("  accumulate=2", sparse, {"accumulate": 2}),
        ("  MultiSteps, 2 steps an update", gathered, {}),
    ]


def main(argv=None):
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="steps of training")
    parser.add_argument("--replicas", type=int, default=4, help="devices, simulated ones on a CPU")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model")
    parser.add_argument("--width", type=int, default=64, help="size of the residual stream")
    options = parser.parse_args(argv)
    # Must be set before JAX starts. Real devices are used where there are any.
    if jax.config.jax_num_cpu_devices < options.replicas:
        jax.config.update("jax_num_cpu_devices", options.replicas)
    mesh = Mesh(jax.devices()[: options.replicas], ("data",))

    config = gpt.Config(layers=options.layers, width=options.width, length=32)
    loss = functools.partial(gpt.loss, config=config)
    params = gpt.init(jax.random.key(0), config)
    batches = batches_of(options.steps, 4 * mesh.size, config.length)

    columns = "", "loss", "density", "bytes a step", "of dense"
    title = f"{mesh.size} replicas, {options.steps} steps"
    table, found, dense = Table(*columns, title=title), {}, None
    for name, tx, more in variants(params, options.steps):
        state = jrc.init_state(params, tx, jax.random.key(1), mesh=mesh)
        step = jrc.make_train_step(loss, tx, mesh=mesh, **more)
        losses, sent = [], []
        for batch in batches:
            state, info = step(state, batch)
            losses.append(float(info.loss))
            sent.append(float(info.bytes_sent))
        last, density = np.mean(losses[-max(1, options.steps // 10) :]), float(info.density)
        dense = dense or np.mean(sent)
        found[name] = {"loss": last, "density": density, "bytes": np.mean(sent), "state": state}
        share = f"{np.mean(sent) / dense:.1%}"
        table.add_row(name, f"{last:.3f}", f"{density:.1%}", f"{np.mean(sent):,.0f}", share)
    Console().print(table)
    return found


if __name__ == "__main__":
    main()
