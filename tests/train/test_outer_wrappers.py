"""Wrappers of optax around AdamW with an outer optimizer: steps, rounds, and the bytes of both.

The table is that of docs/low_communication.md.
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
from tests.train.test_step import NET, net_batch, net_loss

ROUND = 3
OUTER = jrc.SparseLoCo(ROUND, density=0.5, chunk=16)
DENSE = jrc.DiLoCo(ROUND)
GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "low_communication.md"

contrib = optax.contrib
adamw = functools.partial(optax.adamw, 0.05)
W, B = {"w": True, "b": False}, {"w": False, "b": True}
GROUPS = {"large": adamw(), "small": optax.sgd(0.1)}, {"w": "large", "b": "small"}
LARGE = functools.partial(optax.skip_large_updates, max_squared_norm=1e9)


def at_first(step):
    return step < 2


WRAPPERS = {
    "optax.MultiSteps": optax.MultiSteps(adamw(), 3, should_skip_update_fn=LARGE),
    "optax.lookahead": optax.lookahead(adamw(), 2, 0.5),
    "optax.masked": optax.chain(
        optax.masked(adamw(), W), optax.masked(optax.set_to_zero(), B)
    ),
    "optax.contrib.sam": contrib.sam(adamw(), optax.sgd(0.05), opaque_mode=True),
    "optax.lbfgs": optax.lbfgs(),
    "optax.apply_if_finite": optax.apply_if_finite(adamw(), 5),
    "optax.chain": optax.chain(optax.clip_by_global_norm(1.0), adamw()),
    "optax.named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("adamw", adamw())),
    "optax.multi_transform": optax.multi_transform(*GROUPS),
    "optax.partition": optax.partition(*GROUPS),
    "optax.freeze": optax.chain(adamw(), optax.freeze(B)),
    "optax.selective_transform": optax.selective_transform(adamw(), freeze_mask=B),
    "optax.flatten": optax.flatten(adamw()),
    "optax.conditionally_transform": optax.conditionally_transform(adamw(), at_first),
    "optax.conditionally_mask": optax.conditionally_mask(adamw(), at_first),
    "optax.inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(0.1, 0.01, 4)
    ),
    "optax.with_extra_args_support": optax.with_extra_args_support(adamw()),
    "optax.apply_every": optax.chain(adamw(), optax.apply_every(3)),
    "optax.keep_params_nonnegative": optax.chain(adamw(), optax.keep_params_nonnegative()),
    "optax.snapshot": optax.chain(optax.snapshot("norm", optax.tree.norm), adamw()),
    "optax.scale_by_backtracking_linesearch": optax.chain(
        adamw(), optax.scale_by_backtracking_linesearch(5)
    ),
    "optax.contrib.schedule_free": contrib.schedule_free(adamw(b1=0.0), 0.05),
    "optax.contrib.mechanize": contrib.mechanize(adamw()),
    "optax.contrib.split_real_and_imaginary": contrib.split_real_and_imaginary(adamw()),
    "optax.contrib.reduce_on_plateau": optax.chain(adamw(), contrib.reduce_on_plateau(patience=1)),
    "optax.contrib.galore": contrib.galore(0.05, rank=2, base_optimizer=optax.scale_by_adam()),
    "optax.contrib.scale_by_galore": optax.chain(
        contrib.scale_by_galore(rank=2, base_optimizer=optax.scale_by_adam()), optax.scale(-0.05)
    ),
    "optax.contrib.sophia": contrib.sophia(0.05, update_interval=2),
    "optax.contrib.momo_adam": contrib.momo_adam(0.05),
}  # fmt: skip
REFUSED = {
    "optax.monitor": (
        optax.chain(optax.monitor({"norm": optax.tree.norm}), adamw()),
        "jrc.make_train_step: tx must return a state of the structure that it gets",
    ),
    "optax.contrib.differentially_private_aggregate": (
        optax.chain(contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(0)), adamw()),
        "to have a batch dimension in the 0th axis",
    ),
}


def on(replicas):
    return Mesh(jax.devices()[:replicas], ("data",))


def start(tx, replicas, **outer):
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=on(replicas), **outer)
    return state, jrc.make_train_step(net_loss, tx, mesh=on(replicas), donate=False, **outer)


def bytes_in_program(step, state, number):
    """The bytes that a device sends in the compiled program of a step, by its collectives."""
    text = step.lower(state, net_batch(0), number=number).compile().as_text()
    return sum(each.sent for each in collectives(parse_hlo(text), dict(on(2).shape)))


@pytest.mark.exhaustive(after=8)
@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_inner_steps_are_those_of_one_device_and_a_round_sends_what_is_reported(name):
    tx, is_sparse = WRAPPERS[name], list(WRAPPERS).index(name) < 4
    # An outer optimizer sees parameters alone, so that its kind and a wrapper do not meet.
    state, step = start(tx, 2, outer=OUTER if is_sparse else DENSE)
    # The inner steps of a round are one program.
    in_program = [bytes_in_program(step, state, number) for number in (1, ROUND)]
    in_program = [*in_program[:1] * (ROUND - 1), in_program[-1]]
    sent, inner = [], state
    for t in range(2 * ROUND):
        state, info = step(state, net_batch(t))
        sent.append(float(info.bytes_sent))
        assert int(info.left_out) == 0
        inner = state if t == ROUND - 2 else inner
    assert sent == 2 * in_program and in_program[:-1] == [0] * (ROUND - 1) and in_program[-1] > 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    moved = jax.tree.map(lambda new, old: not np.array_equal(new, old), state.params, inner.params)
    assert any(jax.tree.leaves(moved))

    alone, plain = start(tx, 1)
    for t in range(ROUND - 1):
        alone, _ = plain(alone, net_batch(t)[:4])
    own = jax.tree.map(lambda rows: rows[0], inner.opt_state.local)
    assert jax.tree.structure(own.opt_state) == jax.tree.structure(alone.opt_state)
    pairs = zip(jax.tree.leaves(own.params), jax.tree.leaves(alone.params), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_plain_adamw_and_its_wrappers_send_the_same():
    """Leaves that do not move are sent too; with two sets of parameters both are."""
    plain = start(adamw(), 2, outer=OUTER)
    once = bytes_in_program(plain[1], plain[0], ROUND)
    for name, more in {"optax.masked": 1.0, "optax.lookahead": 1.5}.items():
        state, step = start(WRAPPERS[name], 2, outer=OUTER)
        found = bytes_in_program(step, state, ROUND)
        assert found == once if more == 1.0 else found > more * once


@pytest.mark.parametrize("name", REFUSED)
def test_wrappers_that_cannot_work_are_told(name):
    tx, words = REFUSED[name]
    state, step = start(tx, 2, outer=OUTER)
    with pytest.raises((TypeError, ValueError), match=words):
        step(state, net_batch(0))


def rooted_loss(params, batch, key):
    """A loss whose gradient is not finite, while its value is, where an example begins with 0."""
    return jnp.mean(jnp.sqrt(jnp.abs(batch @ params["w"] * batch[:, :1])))


@pytest.mark.slow
def test_a_guard_of_optax_keeps_a_replica_in_the_round():
    """A step is dropped where its results are not finite, and those of a guard are."""
    batch = net_batch(0)
    batch[0, 0] = 0.0
    left_out = []
    for tx in (adamw(), WRAPPERS["optax.apply_if_finite"]):
        state = jrc.init_state(NET, tx, jax.random.key(0), mesh=on(2), outer=OUTER)
        step = jrc.make_train_step(rooted_loss, tx, mesh=on(2), outer=OUTER)
        for _ in range(ROUND):
            state, info = step(state, batch)
        left_out.append(int(info.left_out))
    assert left_out == [1, 0]


def test_the_guide_has_the_table():
    text = GUIDE.read_text()
    assert not [name for name in (*WRAPPERS, *REFUSED) if f"`{name}`" not in text]
    assert not [name for name in public_wrappers() if name not in {**WRAPPERS, **REFUSED}]


@pytest.mark.parametrize("rate", [0.05, jnp.float32(0.05)])
def test_a_hyperparameter_is_set_on_each_replica(rate):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    fn = lambda p, b, k: jnp.mean((b * p["w"]) ** 2)  # noqa: E731
    step = jrc.make_train_step(fn, tx, outer=DENSE)
    state = jrc.init_state({"w": jnp.ones(())}, tx, jax.random.key(0), outer=DENSE)
    rates = state.opt_state.local.opt_state.hyperparams
    rates["learning_rate"] = rate
    with pytest.raises(
        ValueError, match=r"local/.*learning_rate'.* Write jnp\.full\(\(8,\), value"
    ):
        step(state, np.ones(8, np.float32))
    rates["learning_rate"] = jnp.full((8,), rate)
    state, _ = step(state, np.ones(8, np.float32))
    np.testing.assert_allclose(state.opt_state.local.params["w"], 1 - 2 * 0.05, rtol=1e-6)
