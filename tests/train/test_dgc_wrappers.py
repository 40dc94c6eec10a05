"""Wrappers of optax around DGC: equal replicas, and the bytes that the compiled program sends.

The table is that of docs/dgc.md.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jrc
from jrc.remat._compiled.collectives import collectives
from jrc.remat._compiled.hlo import parse_hlo
from tests.train.optax_wrappers import public_wrappers

MESH = Mesh(jax.devices()[:2], ("data",))
PARAMS = {"b": np.zeros(16, np.float32), "w": np.linspace(-1, 1, 128, dtype=np.float32)}
PARAMS["w"] = PARAMS["w"].reshape(8, 16)
BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "dgc.md"
SCALARS = 24
"""Bytes of the numbers that a step reduces: loss, norms, and whether gradients are finite."""

contrib = optax.contrib
SEND = {"sparsity": 0.5, "min_size": 2, "axis_name": "data", "exchange": "allgather"}
scale_by_dgc = functools.partial(jrc.scale_by_dgc, 0.9, **SEND)
W, B = {"w": True, "b": False}, {"w": False, "b": True}


def dgc():
    return optax.chain(scale_by_dgc(), optax.scale(-0.1))


def at_first(step):
    return step < 1


GROUPS = {"large": dgc(), "small": optax.sgd(0.1)}, {"w": "large", "b": "small"}
STATIC = ("rampup_begin_step", "rampup_step", "sparsity", "min_size", "axis_name", "exchange")
MASKED = optax.chain(optax.masked(scale_by_dgc(), W), optax.scale(-0.1))

WRAPPERS = {
    "optax.MultiSteps": optax.MultiSteps(dgc(), 2),
    "optax.conditionally_mask": optax.conditionally_mask(dgc(), at_first),
    "optax.masked": MASKED,
    "optax.chain": dgc(),
    "optax.named_chain": optax.named_chain(("dgc", scale_by_dgc()), ("scale", optax.scale(-0.1))),
    "optax.multi_transform": optax.multi_transform(*GROUPS),
    "optax.partition": optax.partition(*GROUPS),
    "optax.selective_transform": optax.selective_transform(dgc(), freeze_mask=B),
    "optax.freeze": optax.chain(dgc(), optax.freeze(B)),
    "optax.flatten": optax.flatten(dgc()),
    "optax.inject_hyperparams": optax.inject_hyperparams(jrc.dgc_momentum, static_args=STATIC)(
        optax.linear_schedule(0.1, 0.01, 4), momentum=0.9, rampup_begin_step=0, **SEND
    ),
    "optax.with_extra_args_support": optax.with_extra_args_support(dgc()),
    "optax.apply_if_finite": optax.apply_if_finite(dgc(), 3),
    "optax.apply_every": optax.chain(dgc(), optax.apply_every(2)),
    "optax.keep_params_nonnegative": optax.chain(dgc(), optax.keep_params_nonnegative()),
    "optax.lookahead": optax.lookahead(dgc(), 2, 0.5),
    "optax.contrib.schedule_free": contrib.schedule_free(dgc(), 0.1),
    "optax.contrib.split_real_and_imaginary": contrib.split_real_and_imaginary(dgc()),
    "optax.contrib.reduce_on_plateau": optax.chain(dgc(), contrib.reduce_on_plateau(patience=1)),
    "optax.contrib.momo_adam": optax.chain(scale_by_dgc(), contrib.momo_adam(0.05)),
}
SENDS = {"optax.MultiSteps": [0, 1, 0], "optax.conditionally_mask": [1, 0, 0]}
"""Whether the compression is sent in each step, where it is not in all."""

OPAQUE = contrib.sam(dgc(), optax.sgd(0.05), opaque_mode=True)
SNAPSHOT = optax.chain(optax.snapshot("norm", optax.tree.norm), dgc())
PRIVATE = contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(0))
REFUSED = {
    "optax.contrib.sam": (OPAQUE, "sam must not be around a compression"),
    "optax.contrib.mechanize": (contrib.mechanize(dgc()), "mechanize must not be around"),
    "optax.contrib.galore": (
        contrib.galore(0.05, rank=2, base_optimizer=scale_by_dgc()),
        "galore must not be around",
    ),
    "optax.contrib.scale_by_galore": (
        contrib.scale_by_galore(rank=2, base_optimizer=scale_by_dgc()),
        "galore must not be around",
    ),
    "optax.conditionally_transform": (
        optax.conditionally_transform(dgc(), at_first),
        "conditionally_transform must not be around",
    ),
    "optax.snapshot": (SNAPSHOT, "must have no state of its own.*got SnapshotState"),
    "optax.monitor": (
        optax.chain(dgc(), optax.monitor({"norm": optax.tree.norm})),
        "jrc.make_train_step: tx must return a state of the structure that it gets",
    ),
    "optax.lbfgs": (optax.chain(scale_by_dgc(), optax.lbfgs()), "needs 'grad' and 'value_fn'"),
    "optax.contrib.sophia": (
        optax.chain(scale_by_dgc(), contrib.sophia(0.05)),
        "obj_fn must be provided",
    ),
    "optax.contrib.differentially_private_aggregate": (
        optax.chain(PRIVATE, dgc()),
        "to have a batch dimension in the 0th axis",
    ),
}


def loss(params, batch, key):
    return jnp.mean((jnp.tanh(batch @ params["w"] + params["b"][None]) - 0.3) ** 2)


def start(tx):
    state = jrc.init_state(PARAMS, tx, jax.random.key(0), mesh=MESH)
    return state, jrc.make_train_step(loss, tx, mesh=MESH, donate=False)


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize("name", WRAPPERS)
def test_replicas_stay_equal_and_send_what_is_reported(name):
    state, step = start(WRAPPERS[name])
    text = step.lower(state, BATCH).compile().as_text()
    in_program = sum(x.sent for x in collectives(parse_hlo(text), dict(MESH.shape)))
    sent = []
    for _ in range(3):
        state, info = step(state, BATCH)
        sent.append(float(info.bytes_sent))
    expected = [in_program * runs for runs in SENDS.get(name, [1, 1, 1])]
    assert sent == pytest.approx(expected, abs=SCALARS) and in_program > 10 * SCALARS
    for leaf in jax.tree.leaves(state.params):
        one, two = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert np.isfinite(one).all() and np.array_equal(one, two)
    assert not np.array_equal(jax.tree.leaves(state.params)[-1], PARAMS["w"])


def test_a_leaf_outside_of_a_mask_is_averaged_in_every_mini_step():
    state, step = start(optax.MultiSteps(MASKED, 2))
    sent = []
    for _ in range(2):
        state, info = step(state, BATCH)
        sent.append(float(info.bytes_sent))
    assert sent == [4 * 16, 4 * 16 + 8 * 64]


@pytest.mark.parametrize("name", REFUSED)
def test_wrappers_that_cannot_work_are_told(name):
    tx, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=words):
        state, step = start(tx)
        step(state, BATCH)


def test_the_guide_has_the_table():
    text = GUIDE.read_text()
    assert not [name for name in (*WRAPPERS, *REFUSED) if f"`{name}`" not in text]
    assert not [name for name in public_wrappers() if name not in {**WRAPPERS, **REFUSED}]
