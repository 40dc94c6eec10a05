"""One of two processes that train split parameters: `python -m … PORT COUNT RANK DEVICES FOLDER`.

FSDP x tensor parallelism over all devices of both. Each writes what it has to `FOLDER/RANK.pickle`.
"""

import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc.dgc._internal import dgc_states
from jrc.train._preflight import batch as preflight_batch

STEPS, SAVED = 20, 12
SPECS = {"a": P("fsdp", "model"), "b": P(None, "model"), "c": P("model", "fsdp")}


def loss(params, batch, key):
    x, y = batch
    hidden = jnp.tanh(x @ params["a"] + params["b"])
    return jnp.mean((hidden @ params["c"] - y) ** 2)


def some_params():
    draw = np.random.default_rng(0)
    shapes = {"a": (16, 32), "b": (1, 32), "c": (32, 8)}
    return {k: 0.3 * draw.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def whole(i, rows=16):
    """The batch of both processes."""
    draw = np.random.default_rng((1, i))
    return tuple(draw.normal(size=(rows, n)).astype(np.float32) for n in (16, 8))


def start(mesh, **options):
    tx, key = optax.adamw(1e-2), jax.random.key(0)
    place = lambda x, spec: jax.make_array_from_callback(  # noqa: E731
        x.shape, NamedSharding(mesh, spec), lambda index: x[index]
    )
    params = jax.tree.map(place, some_params(), SPECS)
    state = jrc.init_state(params, tx, key, mesh=mesh, axis_name="fsdp")
    step = jrc.make_train_step(loss, tx, mesh=mesh, axis_name="fsdp", via="jit", **options)
    return state, step


def own(mesh, i, rows=16):
    """The batch of which each process gives its own half."""
    half = slice(None, rows // 2) if jax.process_index() == 0 else slice(rows // 2, None)
    join = jax.make_array_from_process_local_data
    parts = (x[half] for x in whole(i, rows))
    return tuple(join(NamedSharding(mesh, P("fsdp")), x) for x in parts)


def here(tree):
    """What lies on this process: each leaf's parts by their places."""
    return {
        name: {str(s.index): np.asarray(s.data) for s in x.addressable_shards}
        for name, x in tree.items()
    }


def said(call):
    """The error of a call."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(mesh, folder):
    """Twenty steps, saved after twelve; the same from there on another mesh of both processes."""
    state, step = start(mesh, donate=False)
    losses = []
    for i in range(STEPS):
        if i == SAVED:
            jrc.save(folder / "state", state)
        state, info = step(state, own(mesh, i))
        losses.append(float(info.loss))
    other = mesh_of((2, 4))
    like, step = start(other)
    again = jrc.restore(folder / "state", like)
    kept = again.params["a"].sharding == like.params["a"].sharding
    for i in range(SAVED, STEPS):
        again, _ = step(again, own(other, i))
    return {
        "params": here(state.params),
        "losses": losses,
        "again": here(again.params),
        "kept": kept,
    }


def moved():
    """What two replicas, one of each process, have of the sums of eight."""
    tx = jrc.dgc_momentum(0.1, 0.9, 0, sparsity=0.9, min_size=0, axis_name="data")
    all_of_them, firsts = (Mesh(jax.devices()[::n], ("data",)) for n in (1, 4))
    state = jrc.init_state(some_params(), tx, jax.random.key(0), mesh=all_of_them)
    step = jrc.make_train_step(loss, tx, mesh=all_of_them)
    for i in range(3):
        state, _ = step(state, whole(i))
    new = jrc.reshard(state, 2, mesh=firsts)
    (own,) = dgc_states(new.opt_state)
    parts = here(new.params), here(own.v)
    _, info = jrc.make_train_step(loss, tx, mesh=firsts)(new, whole(3))
    return *parts, float(info.loss)


def errors(mesh):
    """Batches that processes change in a later step, and one that they hold twice."""
    texts = {}
    state, step = start(mesh, donate=False)
    step(state, own(mesh, 0))
    step(state, own(mesh, 1, rows=32))  # on both: allowed
    preflight_batch._SECONDS = 2.0
    texts["apart"] = said(lambda: step(state, own(mesh, 2, 64 if jax.process_index() else 96)))
    if jax.process_index():  # the other is in its step, and waits
        texts["alone"] = said(lambda: step(state, own(mesh, 3)))
    step(state, own(mesh, 3, rows=32))

    # Both processes lie along "model", so that each holds every example.
    across = Mesh(np.array(jax.devices()).reshape(2, 4).T, ("fsdp", "model"))
    state, step = start(across, donate=False)
    rank = jax.process_index()
    twice = [
        jax.make_array_from_callback(
            x.shape, NamedSharding(across, P("fsdp")), lambda index, x=x: x[index] + rank
        )
        for x in whole(0)
    ]
    texts["copies"] = said(lambda: step(state, tuple(twice)))
    _, info = step(state, whole(0))
    return texts, float(info.loss)


def mesh_of(sizes):
    return jax.make_mesh(sizes, ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)


def main(port, count, rank, devices, folder):
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(
        f"localhost:{port}", int(count), int(rank), initialization_timeout=120
    )
    folder = pathlib.Path(folder)
    mesh = mesh_of((4, 2))
    found = {"train": train(mesh, folder), "moved": moved(), "errors": errors(mesh)}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
