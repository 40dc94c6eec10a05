"""Train an LSTM on long sequences without saving what every step computes.

    python examples/rnn_scan.py
    python examples/rnn_scan.py --length 4096

The gradient of `jax.lax.scan` saves what every step computes: memory grows with the length N.
`jrc.recompute_scan` takes the same arguments, has about 2 sqrt(N) carries in memory, or 4 log4(N)
with `segments="log"`, and recomputes the steps in the backward pass. The losses stay the same.
"""

import argparse
import functools
import pathlib

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from lstm import lstm_cell
from rich.console import Console
from rich.table import Table

import jrc

LOOPS = {
    "jax.lax.scan": jax.lax.scan,
    "jrc.recompute_scan": jrc.recompute_scan,
    'the same, segments="log"': functools.partial(jrc.recompute_scan, segments="log"),
}


def init(key, width):
    keys = jax.random.split(key, 3)
    return {
        "embed": 0.1 * jax.random.normal(keys[0], (256, width)),
        "w": jax.random.normal(keys[1], (2 * width, 4 * width)) / np.sqrt(2 * width),
        # The bias of the forget gate starts at 1.
        "b": jnp.zeros((4, width)).at[1].set(1.0).reshape(-1),
        "head": 0.1 * jax.random.normal(keys[2], (width, 256)),
    }


def loss(params, text, loop):
    """Mean cross-entropy of each next byte; `text` is int32 (batch, length + 1)."""

    def body(state, pair):
        token, following = pair
        hidden, cell = state
        inputs = jnp.concatenate([params["embed"][token], hidden], axis=-1)
        hidden, cell = lstm_cell(inputs @ params["w"] + params["b"][None], cell)
        logits = hidden @ params["head"]
        return (hidden, cell), optax.softmax_cross_entropy_with_integer_labels(logits, following)

    zeros = jnp.zeros((text.shape[0], params["w"].shape[0] // 2))
    _, losses = loop(body, (zeros, zeros), (text[:, :-1].T, text[:, 1:].T))
    return jnp.mean(losses)


def batches_of(steps, size, length):
    """Return bytes of real text, int32 (steps, size, length + 1): argparse's own source."""
    text = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - length, (steps, size))
    return text[starts[..., None] + np.arange(length + 1)]


def train(loss_fn, params, batches):
    tx = optax.adam(1e-2)

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = tx.init(params), []
    for batch in batches:
        params, opt_state, value = step(params, opt_state, batch)
        losses.append(float(value))
    return losses


def main(argv=None):
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps of training")
    parser.add_argument("--length", type=int, default=1024, help="steps of a sequence")
    parser.add_argument("--width", type=int, default=128, help="units of the LSTM")
    options = parser.parse_args(argv)
    params = init(jax.random.key(0), options.width)
    batches = batches_of(options.steps, 8, options.length)

    title = f"LSTM, {options.length} steps: its gradient, and the losses of {options.steps} updates"
    table = Table("loop", "temporaries", "FLOPs", "first loss", "last loss", title=title)
    reports, losses = {}, {}
    for name, loop in LOOPS.items():
        loss_fn = functools.partial(loss, loop=loop)
        reports[name] = jrc.explain(loss_fn, params, batches[0])  # compiles, and runs nothing
        losses[name] = train(loss_fn, params, batches)
        size = f"{reports[name].memory.temporaries / 2**20:,.2f} MiB"
        ratio = f"x {reports[name].flops / reports['jax.lax.scan'].flops:.2f}"
        table.add_row(name, size, ratio, f"{losses[name][0]:.6f}", f"{losses[name][-1]:.6f}")
    Console().print(table)
    return reports, losses


if __name__ == "__main__":
    main()
