"""Train and save after every step until somebody kills it: `PORT COUNT RANK FOLDER`."""

import sys

import jax
from jax.sharding import Mesh

import jrc
from tests.train.train_in_processes import compress, own, start


def main(port, count, rank, folder):
    jax.distributed.initialize(f"localhost:{port}", int(count), int(rank))
    mesh = Mesh(jax.devices(), ("data",))
    state, step = start(compress(), mesh)
    for i in range(10_000):
        state, _ = step(state, own(mesh, i))
        jrc.save(folder, state)
        print(i + 1, "saved", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
