"""Paddle's DGC optimizer: `jrc.dgc_momentum` under Paddle's names, alone and on replicas."""

import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jrc
from jrc.compat import DGCMomentumOptimizer, RecomputeOptimizer
from jrc.models import mlp
from tests.dgc.replicas import AXIS, mesh
from tests.draws import parameters
from tests.remat.measure import bit_equal, largest_error

CONFIG = mlp.Config((8, 16, 2), "tanh")
PARAMS = parameters(mlp.init, jax.random.key(0), config=CONFIG)
LOSS = functools.partial(mlp.loss, config=CONFIG)
RAMP = {"rampup_begin_step": 1, "rampup_step": 2, "sparsity": [0.5, 0.9], "min_size": 20}


def batch(step, size=32):
    rng = np.random.RandomState(step)
    x = rng.random_sample((size, 8)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray((x.sum(1) > 4).astype(np.int32))


def train(opt, steps, params=PARAMS, state=None, start=0):
    state = opt.init(params) if state is None else state
    step = jax.jit(functools.partial(opt.minimize, LOSS))
    for i in range(start, start + steps):
        params, state, loss, _ = step(params, state, batch(i))
    return params, state, loss


@functools.cache
def trained():
    opt = DGCMomentumOptimizer(0.3, 0.9, **RAMP, regularization=0.1)
    return train(opt, 4)[:2]


@pytest.mark.slow
def test_it_is_dgc_momentum():
    rate = optax.linear_schedule(0.3, 0.1, 6)
    opt = DGCMomentumOptimizer(rate, 0.9, 1, 2, [0.5, 0.9], True, 0.5, 1, 1e-3, "dgc", min_size=20)
    tx = jrc.dgc_momentum(rate, 0.9, 1, 2, (0.5, 0.9), True, 0.5, 1, 1e-3, min_size=20)
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(LOSS)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for i in range(6):
        params, state = step(params, state, batch(i))
    got = train(opt, 6)
    assert largest_error(got[0], params) < 1e-6 and largest_error(got[1], state) < 1e-6
    assert opt.name == "dgc" and 0 < float(state[0].density) < 0.2


DOCUMENTED = (
    "learning_rate momentum rampup_begin_step rampup_step sparsity use_nesterov "
    "local_grad_clip_norm num_trainers regularization name"
).split()


def test_the_documented_signature_comes_first_and_later_arguments_behind():
    names = list(inspect.signature(DGCMomentumOptimizer).parameters)
    assert names[: len(DOCUMENTED)] == DOCUMENTED
    assert names[len(DOCUMENTED) :] == ["parameter_list", "grad_clip", "axis_name", "options"]


@pytest.mark.slow
def test_the_bound_has_two_names():
    one, two = (
        DGCMomentumOptimizer(0.3, 0.9, 0, min_size=0, num_trainers=1, **{name: 0.25})
        for name in ("local_grad_clip_norm", "grad_clip")
    )
    assert bit_equal(train(one, 1), train(two, 1))


def test_trainers_and_axis_belong_together():
    for words in ({"num_trainers": 4, "axis_name": AXIS}, {"num_trainers": 1}, {}):
        DGCMomentumOptimizer(0.1, 0.9, 0, **words)
    message = "got num_trainers=4. Pass axis_name='data', the mesh axis with the 4 replicas"
    with pytest.raises(ValueError, match=message):
        DGCMomentumOptimizer(0.1, 0.9, 0, local_grad_clip_norm=1.0, num_trainers=4)


def test_the_defaults_are_paddle_s():
    opt = DGCMomentumOptimizer(0.1, 0.9, 0)
    params = {"w": jnp.ones(16384), "b": jnp.ones(16383)}
    updates, state = jax.jit(opt.update)(params, opt.init(params), params)
    assert int(jnp.count_nonzero(updates["w"])) == 16  # a sparsity of 99.9 %
    assert int(jnp.count_nonzero(updates["b"])) == 16383 and isinstance(state[0], jrc.DGCState)


@pytest.mark.slow
@pytest.mark.parametrize(("check_vma", "recompute"), [(True, True), (False, False)])
def test_on_replicas(check_vma, recompute):
    """Gradients stay local; the result is that of the whole batch and equal on every replica."""
    replicas = 4
    opt = DGCMomentumOptimizer(0.3, 0.9, **RAMP, num_trainers=replicas, axis_name=AXIS)
    if recompute:
        opt = RecomputeOptimizer(opt)
        opt._set_checkpoints(["fc_1", "pred"])
    over = functools.partial(jax.shard_map, mesh=mesh(replicas), check_vma=check_vma)
    specs = jrc.dgc_specs(jax.eval_shape(opt.init, PARAMS), AXIS)
    state = jax.jit(over(opt.init, in_specs=P(), out_specs=specs))(PARAMS)

    def one(params, state, batch):
        params, state, loss, pairs = opt.minimize(LOSS, params, state, batch)
        return params, state, loss[None], jax.tree.map(lambda g: g[None], pairs)

    step = jax.jit(
        over(one, in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs, P(AXIS), P(AXIS)))
    )
    params, sent, whole_batch = PARAMS, [], jax.jit(jax.value_and_grad(LOSS))
    for i in range(5):
        before = params
        params, state, losses, pairs = step(params, state, batch(i))
        sent.append(float(state[0].bytes_sent))
        means = [jnp.mean(grad, axis=0) for _, grad in pairs]
        loss, whole = whole_batch(before, batch(i))
        assert largest_error(means, jax.tree.leaves(whole)) < 1e-5
        assert np.isclose(float(jnp.mean(losses)), float(loss), rtol=1e-5)
        if i == 0:  # a dense momentum step
            want = jax.tree.map(lambda p, g: p - 0.3 * g, before, whole)
            assert largest_error(params, want) < 1e-5
        assert not bit_equal(pairs[1].grad[0], pairs[1].grad[1])
        for leaf in jax.tree.leaves(params):
            shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert all(np.array_equal(shard, shards[0]) for shard in shards)
    assert sent[-1] < sent[0] and int(state[0].skipped) == 0


@pytest.mark.slow
def test_load_restores_what_was_not_sent(tmp_path):
    opt = DGCMomentumOptimizer(0.3, 0.9, **RAMP, regularization=0.1)
    params, state = trained()
    assert float(optax.tree.norm(state[0].v)) > 0
    jrc.save(tmp_path, (params, state))
    loaded = opt.load(tmp_path, (PARAMS, opt.init(PARAMS)))
    assert bit_equal(loaded, (params, state))
    step = jax.jit(functools.partial(opt.minimize, LOSS))
    assert bit_equal(step(*loaded, batch(4)), step(params, state, batch(4)))
    with pytest.raises(ValueError, match="(is|are) not saved|was saved as"):
        opt.load(tmp_path, (PARAMS, optax.adam(0.1).init(PARAMS)))


@pytest.mark.slow
def test_a_parameter_that_is_not_listed_keeps_its_unsent_gradient():
    params, state = trained()
    few = DGCMomentumOptimizer(0.3, 0.9, **RAMP, regularization=0.1, parameter_list=["pred/w"])
    names = []

    @jax.jit
    def step(params, state, batch):
        new, after, _, pairs = few.minimize(LOSS, params, state, batch)
        names.extend(name for name, _ in pairs)
        return new, after

    new, after = step(params, state, batch(5))
    assert names == ["pred/w"] and int(after[0].step) == 5
    assert bit_equal(new["fc_1"], params["fc_1"]) and not bit_equal(new["pred"], params["pred"])
    for field in ("u", "v", "velocity"):
        old, now = getattr(state[0], field), getattr(after[0], field)
        assert bit_equal(now["fc_1"], old["fc_1"]) and bit_equal(now["pred"]["b"], old["pred"]["b"])
    assert not bit_equal(after[0].v["pred"]["w"], state[0].v["pred"]["w"])
    # Leaves that are not listed do not count as sent.
    assert float(after[0].bytes_dense) < float(state[0].bytes_dense) or (
        float(after[0].bytes_dense) == 0
    )


@pytest.mark.slow
def test_grad_clip_takes_a_number_or_paddle_s_object():
    clip = types.SimpleNamespace(clip_norm=0.01)
    one, two, none = (
        train(DGCMomentumOptimizer(0.3, 0.9, 0, min_size=0, num_trainers=1, grad_clip=c), 2)
        for c in (0.01, clip, None)
    )
    assert bit_equal(one, two) and largest_error(one[0], none[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "penalty"), [("L1", jrc.l1_penalty), ("L2", jrc.l2_penalty)])
def test_regularization_takes_paddle_s_object(kind, penalty):
    for suffix in ("Decay", "DecayRegularizer"):
        paddle = type(kind + suffix, (), {"_regularization_coeff": 0.1})()
        one, two = (
            train(DGCMomentumOptimizer(0.3, 0.9, **RAMP, regularization=how), 2)
            for how in (paddle, penalty(0.1))
        )
        assert bit_equal(one, two)
    none = train(DGCMomentumOptimizer(0.3, 0.9, **RAMP), 2)
    assert largest_error(one[0], none[0]) > 1e-3


@pytest.mark.slow
def test_other_options_pass_through():
    clip = {"grad_clip": 0.01, "num_trainers": 1}
    opt = DGCMomentumOptimizer(
        0.3, 0.9, 5, **clip, min_size=0, clip_before_rampup=True, count_dtype="float32"
    )
    params, _, _ = train(opt, 1)
    moved = jax.tree.map(lambda new, old: float(jnp.linalg.norm(new - old)), params, PARAMS)
    assert max(jax.tree.leaves(moved)) < 0.3 * 0.01 * 1.001
    with pytest.raises(ValueError, match="clip_scaling must be one of 'sqrt', 'rsqrt', got 'one'"):
        DGCMomentumOptimizer(0.3, 0.9, 5, **clip, clip_scaling="one")


@pytest.mark.slow
def test_numbers_may_be_numpy_s():
    one, two = (
        DGCMomentumOptimizer(0.3, 0.9, 0, min_size=0, num_trainers=number(1), grad_clip=bound)
        for number, bound in ((int, 0.25), (np.int64, np.float32(0.25)))
    )
    assert bit_equal(train(one, 1), train(two, 1))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"grad_clip": 1.0},
            TypeError,
            "num_trainers, where there is a grad_clip, must be a whole number >= 1",
        ),
        (
            {"grad_clip": 1.0, "num_trainers": 2.0},
            TypeError,
            "whole number >= 1, got 2.0",
        ),
        ({"grad_clip": True, "num_trainers": 1}, TypeError, "with a clip_norm, got bool"),
        (
            {"grad_clip": 1.0, "num_trainers": True},
            TypeError,
            "whole number >= 1, got True",
        ),
        ({"grad_clip": 1.0, "num_trainers": 0}, ValueError, "must be a whole number >= 1, got 0"),
        (
            {"grad_clip": optax.clip(1.0), "num_trainers": 1},
            TypeError,
            "a number or an object with a clip_norm, got GradientTransformation.*grad_clip=1.0",
        ),
        (
            {"num_trainers": 2},
            ValueError,
            "must be 1 or left out .* Pass axis_name='data'",
        ),
        ({"sparsity": [1.0]}, ValueError, r"every sparsity must be a number in \[0, 1\), got 1.0"),
        ({"regularization": "l2"}, TypeError, "regularization must be a number"),
    ],
)
def test_arguments_that_do_not_fit(options, error, words):
    with pytest.raises(error, match=words):
        DGCMomentumOptimizer(0.1, 0.9, 0, **options)


def test_an_axis_that_nothing_binds():
    opt = DGCMomentumOptimizer(0.1, 0.9, 0, axis_name=AXIS)
    with pytest.raises(ValueError, match="must be an axis that is bound .* got axis_name='data'"):
        opt.minimize(LOSS, PARAMS, opt.init(PARAMS), batch(0))


def test_errors_name_this_optimizer():
    opt = DGCMomentumOptimizer(0.1, 0.9, 0)
    with pytest.raises(TypeError, match="DGCMomentumOptimizer.minimize: loss_fn must be a"):
        opt.minimize(jnp.float32(1), PARAMS, opt.init(PARAMS))
    opt = DGCMomentumOptimizer(0.1, 0.9, 0, parameter_list=["fc_9/w"])
    with pytest.raises(ValueError, match=r"got 'fc_9/w' \(did you mean 'fc_1/w'"):
        opt.backward(LOSS, PARAMS, batch(0))
