"""One of several processes that train together: `python -m … PORT COUNT RANK DEVICES FOLDER PART`.

Each writes what it has to `FOLDER/RANK.pickle`; the tests compare. `PART` is `train`, `all` for
errors too, or `left out` for a mesh without the last process alone.
"""

import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc

STEPS, SAVED = 10, 6


def loss(params, batch, key):
    x, y = batch
    keep = jax.random.bernoulli(key, 0.9, (len(x), 64))
    return jnp.mean((jnp.where(keep, jnp.tanh(x @ params["in"]), 0) @ params["out"] - y) ** 2)


def start_params():
    rng = np.random.default_rng(0)
    shapes = {"in": (16, 64), "out": (64, 4)}
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def whole(i):
    """The batch of all processes."""
    rng = np.random.default_rng((1, i))
    return rng.normal(size=(32, 16)).astype(np.float32), rng.normal(size=(32, 4)).astype(np.float32)


def compress():
    """Dense on steps 0 and 1, masked on 2 to 4, for two replicas sparse from 5, for four from 8."""
    levels = (0.5, 0.75, 0.99)
    return jrc.dgc_momentum(
        0.1, 0.9, 2, 9, levels, local_grad_clip_norm=1.0, min_size=1000, axis_name="data"
    )


def start(tx, mesh, **options):
    state = jrc.init_state(start_params(), tx, jax.random.key(7), mesh=mesh)
    return state, jrc.make_train_step(loss, tx, mesh=mesh, **options)


def mine(x):
    """This process's part of a leaf of the batch."""
    size = len(x) // jax.process_count()
    return x[size * jax.process_index() :][:size]


def joined(mesh, parts):
    join = jax.make_array_from_process_local_data
    return jax.tree.map(lambda x: join(NamedSharding(mesh, P("data")), x), parts)


def own(mesh, i):
    """The batch of which each process gives its own part."""
    return joined(mesh, jax.tree.map(mine, whole(i)))


def here(tree):
    """What lies on this process: the parts of every leaf by their places, as NumPy."""

    def parts(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return {str(shard.index): np.asarray(shard.data) for shard in x.addressable_shards}

    return jax.tree.map(parts, tree)


def train(mesh, folder):
    """Ten steps, saved after six, taken up again there; then one step with a NaN."""
    state, step = start(compress(), mesh)
    infos = []
    for i in range(STEPS):
        if i == SAVED:
            jrc.save(folder / "state", state)
        state, info = step(state, own(mesh, i))
        infos.append(jax.device_get(info))
    found = {"state": here(state), "infos": infos, "flushed": here(jrc.flush(state, 0.1))}

    again = jrc.restore(folder / "state", state)
    for i in range(SAVED, STEPS):
        again, _ = step(again, own(mesh, i))
    found["again"] = here(again)

    x, y = jax.tree.map(mine, whole(STEPS))
    if jax.process_index() == 1:
        x[-1, 0] = np.nan
    after, info = step(state, joined(mesh, (x, y)))
    found |= {"after": here(after), "skipped": bool(info.skipped)}
    return found


def train_dense(mesh):
    """Without compression; the whole batch as NumPy on every process."""
    state, step = start(optax.adam(1e-2), mesh)
    for i in range(4):
        state, info = step(state, whole(i))
    found = {"params": here(state.params), "bytes": float(info.bytes_sent)}
    if jax.process_index():
        jrc.make_train_step(loss, optax.adam(1e-2), mesh=mesh)  # one that this process alone makes
    state, step = start(optax.adam(1e-2), mesh)
    state, _ = step(state, whole(0))
    shorter = jax.tree.map(lambda x: x[:16], whole(1))
    return found | {"shorter": float(step(state, shorter)[1].loss)}


def plan(mesh):
    state, step = start(optax.sgd(0.1), mesh, memory_budget=0.0)
    _, info = step(state, own(mesh, 0))
    return step.plan.to_json(), float(info.loss)


def errors(mesh, folder):
    """Wrong calls on some or all processes, and the error on each of them."""
    rank, texts = jax.process_index(), {}

    def attempt(name, call, *args, **kwargs):
        try:
            call(*args, **kwargs)
            texts[name] = ""
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"

    params, tx, key = start_params(), compress(), jax.random.key(7)
    state = jrc.init_state(params, tx, key, mesh=mesh)

    def step(batch):
        jrc.make_train_step(loss, tx, mesh=mesh)(state, batch)

    attempt("own part as the whole", step, jax.tree.map(mine, whole(0)))
    attempt("ragged", step, jax.tree.map(lambda x: x[: 16 + rank], whole(0)))
    uneven = jax.tree.map(lambda x: x[: 4 + 2 * rank], whole(0))
    attempt("uneven parts", step, joined(mesh, uneven))
    attempt("other parameters", jrc.init_state, jax.tree.map(lambda x: x + rank, params), tx, key)
    alone = Mesh(jax.devices()[:1], ("data",))
    attempt("no device here", jrc.init_state, params, tx, key, mesh=alone)
    attempt("pmap", jrc.make_train_step, loss, tx, via="pmap")
    attempt("jit", jrc.make_train_step, loss, tx, via="jit")

    def plan(budget):
        jrc.make_train_step(loss, tx, mesh=mesh, memory_budget=budget)(state, own(mesh, 0))

    attempt("budget", plan, "1kB" if rank else "1GiB")

    g, path = state.opt_state[0].u, folder / "errors"
    attempt("array of one process", jrc.save, path, {"g": g, "x": jnp.ones(2)})
    attempt("no array here", jrc.save, path, {"g": g, "x": "text" if rank else np.ones(2)})
    attempt("other trees", jrc.save, path, {"g": g, "x": np.ones(2 + rank)})
    attempt("folders apart", jrc.save, folder / f"apart{rank}" / "x", {"g": g})
    (folder / f"apart{rank}").mkdir(exist_ok=True)
    attempt("nothing to restore", jrc.restore, folder / "apart0", {"g": g})
    attempt("missing here", jrc.restore, folder / ("state" if rank == 0 else "none"), {"g": g})
    attempt("other save", jrc.restore, folder / ("state" if rank == 0 else "apart1"), state)

    def with_rows(x):
        rows = x.shape[0] * 2
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=x.sharding)

    compressed = state.opt_state[0]._replace(u=jax.tree.map(with_rows, g))
    more = state._replace(opt_state=(compressed, *state.opt_state[1:]))
    attempt("other replicas", jrc.restore, folder / "state", more)
    return texts


def left_out():
    """A mesh that has the devices of several processes, and not those of the last."""
    try:
        jrc.init_state(
            start_params(), compress(), jax.random.key(7), mesh=Mesh(jax.devices()[:-1], ("data",))
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(port, count, rank, devices, folder, part):
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(
        f"localhost:{port}", int(count), int(rank), initialization_timeout=120
    )
    folder = pathlib.Path(folder)
    mesh = Mesh(jax.devices(), ("data",))
    if part == "left out":
        found = {"left out": left_out()}
    else:
        found = {"train": train(mesh, folder), "dense": train_dense(mesh)}
    if part == "all":
        found |= {"plan": plan(mesh), "errors": errors(mesh, folder)}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
