"""Save leaves that all equal one number, once two such programs run: `FOLDER NUMBER TIMES`."""

import pathlib
import sys
import time

import jax.numpy as jnp

import jrc


def state_of(number):
    return {f"leaf {i}": jnp.full(1000, number) for i in range(8)}


def main(folder, number, times):
    folder = pathlib.Path(folder)
    (folder / f"ready {number}").touch()
    while len(list(folder.glob("ready *"))) < 2:
        time.sleep(0.01)
    for _ in range(int(times)):
        jrc.save(folder / "state", state_of(float(number)))


if __name__ == "__main__":
    main(*sys.argv[1:])
