"""One of two processes whose devices are the replicas of a run: `… PORT COUNT RANK DEVICES FOLDER`.

Each process is a replica, split over its four devices. It writes what it has to
`FOLDER/RANK.pickle`; the test compares.
"""

import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.train.sharded_in_processes import loss, some_params, whole

STEPS, SAVED = 6, 3
OUTER = jrc.DiLoCo(4, fragments=2, overlap=1)
SPECS = {"a": P("fsdp", "model"), "b": P(), "c": P("model", "fsdp")}
AXES = ("replica", "fsdp", "model")


def noisy(params, model_state, batch, key):
    """With keys in the model state, as flax nnx has them: one that changes, and a split array."""
    x, y = batch
    own, new = jax.random.split(model_state["key"])
    noise = jax.vmap(jax.random.normal)(model_state["keys"])[:, None]
    scale = 1 + 0.1 * jax.random.normal(own) + 0.01 * noise.mean()
    return loss(params, (scale * x, y), key), ({**model_state, "key": new}, None)


def some_keys(mesh):
    words = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), 4)))
    split = NamedSharding(mesh, P("fsdp"))
    words = jax.make_array_from_callback(words.shape, split, lambda index: words[index])
    return {"key": jax.random.key(2), "keys": jax.random.wrap_key_data(words)}


def start(mesh, specs=SPECS):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    place = lambda x, spec: jax.make_array_from_callback(  # noqa: E731
        x.shape, NamedSharding(mesh, spec), lambda index: x[index]
    )
    params = jax.tree.map(place, some_params(), specs)
    on = {"mesh": mesh, "axis_name": "replica", "outer": OUTER}
    state = jrc.init_state(params, tx, jax.random.key(0), model_state=some_keys(mesh), **on)
    return state, jrc.make_train_step(noisy, tx, **on)


def own(mesh, i):
    """The batch of which each process gives its own half."""
    x = whole(i)
    half = len(x[0]) // 2
    rows = slice(None, half) if jax.process_index() == 0 else slice(half, None)
    join = jax.make_array_from_process_local_data
    return tuple(join(NamedSharding(mesh, P(("replica", "fsdp"))), part[rows]) for part in x)


def plain(state):
    """What is compared, keys as their words."""
    tree = state.params, state.model_state, state.opt_state
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def here(tree):
    """What lies on this process: each leaf's parts by their places."""
    return [
        {str(shard.index): np.asarray(shard.data) for shard in x.addressable_shards}
        for x in jax.tree.leaves(tree)
    ]


def train(mesh, folder):
    """Saved with an exchange under way, and taken up again there; then by as many replicas."""
    state, step = start(mesh)
    infos = []
    for i in range(STEPS):
        if i == SAVED:
            jrc.save(folder / "state", state)
        state, info = step(state, own(mesh, i))
        infos.append(jax.device_get(info._replace(aux=None)))
    again, step = start(mesh)
    again = jrc.restore(folder / "state", again)
    for i in range(SAVED, STEPS):
        again, _ = step(again, own(mesh, i))
    return {"state": here(plain(state)), "infos": infos, "resumed": here(plain(again))}


def main(port, count, rank, devices, folder):
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(
        f"localhost:{port}", int(count), int(rank), initialization_timeout=120
    )
    folder = pathlib.Path(folder)
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(train(mesh, folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
