"""One of several processes with an outer optimizer: `… PORT COUNT RANK DEVICES FOLDER`.

Each writes what it has to `FOLDER/RANK.pickle`; the test compares.
"""

import pathlib
import pickle
import sys

import jax
import optax
from jax.sharding import Mesh

import jrc
from tests.train.train_in_processes import here, loss, own, start_params

STEPS, SAVED = 8, 4
OUTER = jrc.SparseLoCo(3, density=1 / 8, chunk=256)
STREAMED = jrc.DiLoCo(4, fragments=2, overlap=1)


def start(mesh, outer=OUTER):
    tx = optax.adamw(1e-2)
    state = jrc.init_state(start_params(), tx, jax.random.key(7), mesh=mesh, outer=outer)
    return state, jrc.make_train_step(loss, tx, mesh=mesh, outer=outer)


def train(mesh, folder, outer=OUTER):
    """Eight steps, saved after four, in the middle of a round, and taken up again there."""
    state, step = start(mesh, outer)
    infos = []
    for i in range(STEPS):
        if i == SAVED:
            jrc.save(folder / "state", state)
        state, info = step(state, own(mesh, i))
        infos.append(jax.device_get(info))
    found = {"state": here(state), "infos": infos}
    again, step = start(mesh, outer)
    again = jrc.restore(folder / "state", again)
    for i in range(SAVED, STEPS):
        again, _ = step(again, own(mesh, i))
    return found | {"resumed": here(again)}


def main(port, count, rank, devices, folder):
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(f"localhost:{port}", int(count), int(rank))
    folder = pathlib.Path(folder)
    mesh = Mesh(jax.devices(), ("data",))
    found = train(mesh, folder)
    found["streamed"] = train(mesh, folder / "streamed", STREAMED)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
