"""Train and save after every step until killed: `PORT COUNT RANK FOLDER [background]`."""

import sys

import jax
from jax.sharding import Mesh

import jrc
from tests.train.train_in_processes import compress, own, start


def main(port, count, rank, folder, background=""):
    jax.distributed.initialize(f"localhost:{port}", int(count), int(rank))
    mesh = Mesh(jax.devices(), ("data",))
    state, step = start(compress(), mesh)
    for i in range(10_000):
        state, _ = step(state, own(mesh, i))
        jrc.save(folder, state, wait=not background)
        print(i + 1, "saved", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
