"""Train the MLP of Paddle's sample with Paddle's names: a recompute optimizer, and DGC in it.

    python examples/paddle_mlp.py
    python examples/paddle_mlp.py --steps 100

Prints the losses of both, and of the same training with nothing recomputed.
"""

import functools

import common
import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from jrc.compat import DGCMomentumOptimizer, RecomputeOptimizer
from jrc.models import mlp

CONFIG = mlp.Config()  # 32 -> 128 -> 2, with the marks fc_1 and pred


def batches(steps):
    rng = np.random.RandomState(0)
    for _ in range(steps):
        x = rng.random_sample((32, 32)).astype(np.float32)
        yield x, rng.randint(2, size=(32, 1))[:, 0].astype(np.int32)


def losses(optimizer, checkpoints, steps):
    opt = RecomputeOptimizer(optimizer)
    opt._set_checkpoints(checkpoints)
    params = mlp.init(jax.random.key(0), CONFIG)
    opt_state = opt.init(params)
    step = jax.jit(functools.partial(opt.minimize, functools.partial(mlp.loss, config=CONFIG)))
    found = []
    for batch in batches(steps):
        params, opt_state, loss, params_grads = step(params, opt_state, batch)
        found.append(float(loss))
    return found, [name for name, _ in params_grads]


def main(argv=None):
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps of training")
    steps = parser.parse_args(argv).steps
    if steps < 1:
        parser.error(f"--steps must be a whole number >= 1, got {steps}.")

    adam = optax.adam(0.01)
    dgc = DGCMomentumOptimizer(
        learning_rate=0.1, momentum=0.9, rampup_begin_step=2, sparsity=[0.99], min_size=0
    )
    plain, _ = losses(adam, [], steps)
    lean, names = losses(adam, ["fc_1", "pred"], steps)
    compressed, _ = losses(dgc, ["fc_1", "pred"], steps)

    table = Table("step", "adam", "adam, re-run", "DGC, re-run", title="loss of Paddle's MLP")
    for i in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        table.add_row(str(i), *(f"{run[i]:.6f}" for run in (plain, lean, compressed)))
    console = Console()
    console.print(table)
    console.print("gradients of " + ", ".join(names))
    return plain, lean, compressed


if __name__ == "__main__":
    main()
