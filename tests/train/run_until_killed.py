"""Train and save after every step until somebody kills the process: `FOLDER TASK`."""

import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jrc  # noqa: E402
from tests.train.tasks import dgc, start  # noqa: E402


def main(folder, task):
    state, step, batch = start(task, dgc())
    for i in range(10_000):
        state, _ = step(state, batch(i))
        jrc.save(folder, state)
        print(i + 1, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
