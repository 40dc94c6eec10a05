"""Paddle's RecomputeOptimizer: its net, its methods, and parameters without a gradient."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jrc
from jrc.compat import DGCMomentumOptimizer, RecomputeOptimizer
from jrc.models import mlp
from tests.draws import parameters
from tests.remat.measure import bit_equal, largest_error, operators

CONFIG = mlp.Config()
PARAMS = parameters(mlp.init, jax.random.key(0), config=CONFIG)
LOSS = functools.partial(mlp.loss, config=CONFIG)


def batches(steps):
    rng = np.random.RandomState(0)
    for _ in range(steps):
        x = rng.random_sample((32, 32)).astype(np.float32)
        yield jnp.asarray(x), jnp.asarray(rng.randint(2, size=(32, 1))[:, 0])


def optimizer(tx, checkpoints=("fc_1", "pred")):
    opt = RecomputeOptimizer(tx)
    opt._set_checkpoints(list(checkpoints))
    return opt


def train(opt, steps=10, params=PARAMS, **options):
    step = jax.jit(functools.partial(opt.minimize, LOSS, **options))
    state, history = opt.init(params), []
    for batch in batches(steps):
        params, state, loss, pairs = step(params, state, batch)
        history.append((loss, pairs, params))
    return params, state, history


def plainly(tx, steps=10):
    params, state, losses = PARAMS, tx.init(PARAMS), []

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(LOSS)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in batches(steps):
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return params, losses


def test_on_paddle_s_net_the_boundaries_change_no_result():
    """Losses, gradients and parameters over ten steps."""
    tx = optax.adam(0.01)
    choices = [c for n in range(3) for c in itertools.combinations(CONFIG.boundaries, n)]
    assert choices == [(), ("fc_1",), ("pred",), ("fc_1", "pred")]
    runs = [train(optimizer(tx, choice)) for choice in choices]
    for _, _, history in runs[1:]:
        assert bit_equal(history, runs[0][2])
    params, losses = plainly(tx)
    assert largest_error(runs[0][0], params) < 1e-4
    assert np.allclose([loss for loss, *_ in runs[0][2]], losses, rtol=1e-5)
    assert [pair.name for pair in runs[0][2][0][1]] == ["fc_1/b", "fc_1/w", "pred/b", "pred/w"]


def test_segments_are_recomputed():
    def loss_fn(params, x):
        for i in range(3):
            x = jrc.mark(jnp.sin(jnp.sin(x @ params[f"{i}"]) @ params[f"{i}"]), f"h_{i}")
        return jnp.mean(x)

    params = {f"{i}": jnp.eye(4) * (0.5 + i) for i in range(3)}

    def dots(*checkpoints):
        opt = optimizer(optax.sgd(0.1), checkpoints)
        step = functools.partial(opt.minimize, loss_fn)
        return operators(step, params, opt.init(params), jnp.ones((2, 4)))["dot_general"]

    segments = jrc.find_segments(
        loss_fn, ["h_0", "h_1", "h_2"], params, jnp.ones((2, 4)), rule="fluid"
    ).segments
    again = sum(name.startswith("dot_general") for s in segments for name in s.rerun)
    assert again > 0 and dots("h_0", "h_1", "h_2") == dots() + again


def test_the_phases_give_what_minimize_gives():
    batch = next(batches(1))
    opt = optimizer(optax.adamw(0.01))
    state = opt.init(PARAMS)
    params, new, loss, pairs = opt.minimize(LOSS, PARAMS, state, batch)
    again = opt.backward(LOSS, PARAMS, batch)
    assert bit_equal(again, pairs) and bit_equal(loss, LOSS(PARAMS, batch))
    assert bit_equal(opt.apply_gradients(PARAMS, state, again[::-1]), (params, new))
    assert bit_equal(opt.apply_optimize(loss, None, again, PARAMS, state), (params, new))
    both = lambda params, batch: (LOSS(params, batch),) * 2  # noqa: E731
    pairs, loss_again = opt.backward(both, PARAMS, batch, has_aux=True)
    assert bit_equal(pairs, again) and bit_equal(loss_again, loss)
    *_, value, _ = opt.minimize(both, PARAMS, state, batch, has_aux=True)
    assert bit_equal(value, (loss, loss))


TRANSFORMS = {
    "adam": optax.adam(0.01),
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "decay, then clip": optax.chain(
        optax.add_decayed_weights(0.1), optax.clip_by_global_norm(0.1), optax.sgd(0.1, 0.9)
    ),
    "lamb": optax.lamb(0.01),
    "adafactor": optax.adafactor(0.01),
    "multi steps": optax.MultiSteps(optax.adam(0.01), 2),
    "masked": optax.masked(optax.adamw(0.01), {"fc_1": True, "pred": {"w": True, "b": False}}),
    "two groups": optax.multi_transform(
        {"a": optax.adamw(0.01), "b": optax.sgd(0.1, 0.9)}, {"fc_1": "a", "pred": "b"}
    ),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.0, 9)),
    "dgc": jrc.dgc_momentum(0.1, 0.9, 1, 1, (0.9,), regularization=0.1, min_size=100),
    "dgc optimizer": DGCMomentumOptimizer(0.1, 0.9, 0, sparsity=[0.9], min_size=0),
}
LISTED = ["pred/w", "fc_1/b"]


def of_leaf(tree, *path):
    """The leaves of a tree for one parameter, by their path."""
    return {
        jax.tree_util.keystr(where): x
        for where, x in jax.tree.leaves_with_path(tree)
        if [getattr(key, "key", None) for key in where[-2:]] == list(path)
    }


@pytest.mark.exhaustive(after=5)
@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_parameters_that_are_not_listed_are_unchanged(name):
    tx = TRANSFORMS[name]
    # Nonzero moments, which a decay would change.
    params, state, _ = train(optimizer(tx), 3)
    step = jax.jit(functools.partial(optimizer(tx).minimize, LOSS, parameter_list=LISTED))
    new, after, _, pairs = step(params, state, next(batches(1)))
    assert [pair.name for pair in pairs] == LISTED
    for path in (("fc_1", "w"), ("pred", "b")):
        assert bit_equal(of_leaf(new, *path), of_leaf(params, *path))
        kept = of_leaf(state, *path)
        assert bit_equal(of_leaf(after, *path), kept)
        assert kept or (name == "masked" and path == ("pred", "b"))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    if name != "multi steps":
        for path in (("fc_1", "b"), ("pred", "w")):
            assert not bit_equal(of_leaf(new, *path), of_leaf(params, *path))
    counts = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int32]
    later = [x for x in jax.tree.leaves(after) if x.dtype == jnp.int32]
    assert name == "lamb" or not counts or not bit_equal(counts, later)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["adamw", "decay, then clip", "lamb", "dgc"])
def test_listed_parameters_are_updated_as_if_alone(name):
    """Norms and decays leave out parameters without a gradient."""
    tx, batch = TRANSFORMS[name], next(batches(1))
    new, *_ = optimizer(tx).minimize(LOSS, PARAMS, tx.init(PARAMS), batch, parameter_list=LISTED)
    alone = {"fc_1": {"b": PARAMS["fc_1"]["b"]}, "pred": {"w": PARAMS["pred"]["w"]}}
    fill = lambda p: {k: PARAMS[k] | p[k] for k in PARAMS}  # noqa: E731
    grads = jax.grad(lambda p: LOSS(fill(p), batch))(alone)
    updates, _ = tx.update(grads, tx.init(alone), alone)
    assert largest_error(new, fill(optax.apply_updates(alone, updates))) < 1e-6


@pytest.mark.slow
def test_without_gradients_nothing_is_updated():
    for tx in (optax.adamw(0.1), DGCMomentumOptimizer(0.1, 0.9, 0)):
        params, state, _ = train(optimizer(tx), 1)
        new, after, loss, pairs = optimizer(tx).minimize(
            LOSS, params, state, next(batches(1)), parameter_list=[]
        )
        assert pairs == [] and bit_equal(new, params) and loss.shape == ()
        moments = lambda s: [x for x in jax.tree.leaves(s) if x.ndim]  # noqa: E731
        assert bit_equal(moments(after), moments(state))


def test_parameters_of_other_dtypes_are_unchanged():
    params = {"w": jnp.ones(3), "n": jnp.arange(3), "table": np.ones(3, np.float32), "none": None}
    opt = optimizer(optax.adamw(0.1), [])
    loss_fn = lambda p: jnp.sum(p["w"] * p["n"] * p["table"])  # noqa: E731
    new, _, _, pairs = opt.minimize(loss_fn, params, opt.init(params), no_grad_set=["table"])
    assert [name for name, _ in pairs] == ["w"]
    assert new["n"] is params["n"] and new["table"] is params["table"] and new["none"] is None
    assert not bit_equal(new["w"], params["w"])


def test_grad_clip_acts_on_existing_gradients():
    batch, opt = next(batches(1)), optimizer(optax.sgd(1.0))
    clip = optax.clip_by_global_norm(1e-3)
    new, _, _, pairs = opt.minimize(
        LOSS, PARAMS, opt.init(PARAMS), batch, grad_clip=clip, parameter_list=LISTED
    )
    moved = jax.tree.map(lambda a, b: a - b, new, PARAMS)
    assert np.isclose(float(optax.tree.norm(moved)), 1e-3, rtol=1e-2)
    # The pairs are those before clipping, as in Paddle.
    assert float(optax.tree.norm([grad for _, grad in pairs])) > 1e-2
    with pytest.raises(TypeError, match="grad_clip must be an optax transform, got 1.0. Write gra"):
        opt.minimize(LOSS, PARAMS, opt.init(PARAMS), batch, grad_clip=1.0)
    with pytest.raises(TypeError, match="grad_clip must be a transform without state"):
        opt.minimize(LOSS, PARAMS, opt.init(PARAMS), batch, grad_clip=optax.trace(0.9))


TAKING_MORE = {
    "polyak": optax.polyak_sgd(),
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    "momo": optax.contrib.momo(0.1),
    "lbfgs": optax.lbfgs(),
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", TAKING_MORE)
def test_transforms_with_extra_arguments(name):
    tx = TAKING_MORE[name]

    def loss(p):
        return jnp.sum(jrc.mark(jnp.sin(p["a"]) * p["b"], "h") ** 2)

    params = {"a": jnp.linspace(0.2, 1.0, 3), "b": jnp.ones(3)}
    opt, state = optimizer(tx, ["h"]), tx.init(params)
    value, grad = jax.value_and_grad(loss)(params)
    more = {"value": value, "grad": grad, "value_fn": loss}
    updates, want = tx.update(grad, state, params, **more)
    got, new, _, pairs = jax.jit(lambda p, s: opt.minimize(loss, p, s))(params, state)
    assert largest_error(got, optax.apply_updates(params, updates)) < 1e-5
    assert jax.tree.structure(new) == jax.tree.structure(want)
    again, _ = opt.apply_gradients(params, state, pairs, value=value, value_fn=loss)
    assert largest_error(again, got) < 1e-5
    assert largest_error(opt.update(grad, state, params, **more)[0], updates) < 1e-6


@pytest.mark.slow
def test_a_transform_that_takes_only_arguments_that_it_knows():
    """`optax.contrib.sam` takes `grad_fn` and refuses every other extra argument."""
    tx = optax.contrib.sam(optax.sgd(0.05), optax.sgd(0.05), sync_period=2)
    params, _, history = train(optimizer(tx), 6)
    want, losses = plainly(tx, 6)
    assert largest_error(params, want) < 1e-6
    np.testing.assert_allclose([loss for loss, _, _ in history], losses, rtol=1e-5)
    listed = optimizer(tx)
    state = listed.init(PARAMS)
    pairs = listed.backward(LOSS, PARAMS, *batches(1))
    listed.apply_gradients(PARAMS, state, pairs)
    with pytest.raises(TypeError, match="unexpected keyword argument 'value'"):
        listed.apply_gradients(PARAMS, state, pairs, value=1.0)


def test_one_in_a_chain_too():
    sam = optax.contrib.sam(optax.sgd(0.05), optax.sgd(0.05), sync_period=2)
    tx = optax.chain(sam, optax.identity())
    params, *_ = train(optimizer(tx), 2)
    assert largest_error(params, plainly(tx, 2)[0]) < 1e-6


def test_they_reach_what_is_inside_of_multi_steps():
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    opt = optimizer(optax.MultiSteps(plateau, 1))
    new, *_ = opt.minimize(LOSS, PARAMS, opt.init(PARAMS), *batches(1))
    assert largest_error(new, PARAMS) > 0
    updates, _ = opt.update(PARAMS, opt.init(PARAMS), PARAMS, value=1.0)
    assert largest_error(updates, jax.tree.map(lambda x: -0.1 * x, PARAMS)) < 1e-6


def test_a_line_search_updates_the_listed_parameters_only():
    def loss(p):
        return jnp.sum((p["a"] - p["b"]) ** 2) + jnp.sum(p["b"])

    params = {"a": jnp.ones(3), "b": jnp.zeros(3)}
    opt = optimizer(optax.lbfgs(), [])
    new, _, value, _ = opt.minimize(loss, params, opt.init(params), parameter_list=["a"])
    assert float(loss(new)) < float(value) and bit_equal(new["b"], params["b"])


def test_marks_callbacks_and_no_grad_set_reach_minimize():
    batch, opt, calls = next(batches(1)), optimizer(optax.adam(0.1)), []
    new, _, _, pairs = opt.minimize(
        LOSS,
        PARAMS,
        opt.init(PARAMS),
        batch,
        parameter_list=["fc_1", "pred/w", "pred/b"],
        no_grad_set={"pred/b"},
        callbacks=lambda block, context: calls.append(context["__current_op_desc__"].type),
    )
    assert [name for name, _ in pairs] == ["fc_1", "pred/w"] and calls[-1] == "dot_general_grad"
    assert bit_equal(new["fc_1"], PARAMS["fc_1"]) and bit_equal(
        new["pred"]["b"], PARAMS["pred"]["b"]
    )
    assert not bit_equal(new["pred"]["w"], PARAMS["pred"]["w"])


def test_checkpoints_of_backward_replace_those_that_were_set():
    opt, batch = optimizer(optax.adam(0.1), []), next(batches(1))
    count = lambda **more: operators(lambda p: opt.backward(LOSS, p, batch, **more), PARAMS)  # noqa: E731
    regions = lambda c: c["remat2"] + c["checkpoint"] + c["RematTraced"]  # noqa: E731
    assert regions(count()) == 0 < regions(count(checkpoints=["fc_1"]))


@pytest.mark.slow
def test_a_wrapped_optimizer_keeps_its_settings():
    dgc = DGCMomentumOptimizer(0.1, 0.9, 0, parameter_list=["pred/w"])
    *_, pairs = optimizer(dgc).minimize(LOSS, PARAMS, dgc.init(PARAMS), next(batches(1)))
    assert [name for name, _ in pairs] == ["pred/w"]
    one, two = train(optimizer(dgc)), train(optimizer(dgc.tx), parameter_list=["pred/w"])
    assert bit_equal(one, two)
    # Both kinds of optimizer are optax transforms.
    chained = optax.chain(optax.clip(1.0), optimizer(optax.adam(0.1)))
    updates, _ = chained.update(PARAMS, chained.init(PARAMS), PARAMS)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


def test_boundaries_must_be_set():
    opt = RecomputeOptimizer(optax.adam(0.1))
    state, batch = opt.init(PARAMS), next(batches(1))
    with pytest.raises(ValueError) as error:
        opt.minimize(LOSS, PARAMS, state, batch)
    assert str(error.value) == (
        "jrc.compat.RecomputeOptimizer.minimize: checkpoints must be set before, to a list of "
        "mark names, got none. Write opt._set_checkpoints(['fc_1', 'pred'])."
    )
    with pytest.raises(ValueError, match="RecomputeOptimizer.backward: checkpoints must be set"):
        opt.backward(LOSS, PARAMS, batch)
    words = "RecomputeOptimizer: checkpoints must be a list of mark names, got"
    with pytest.raises(TypeError, match=f"{words} str 'fc_1'. Mark values with jrc.mark"):
        opt._set_checkpoints("fc_1")
    with pytest.raises(TypeError, match=f"{words} one with int"):
        opt.set_checkpoints(["fc_1", 3])
    opt.set_checkpoints(CONFIG.boundaries)
    assert opt.minimize(LOSS, PARAMS, state, batch)[2].shape == ()


def test_load_is_paddle_s():
    words = (
        r"load function is not supported by Recompute Optimizer for now, .* write opt_state = "
        r"jrc.restore\('runs/mine', opt.init\(params\)\)"
    )
    with pytest.raises(NotImplementedError, match=words):
        optimizer(optax.adam(0.1)).load("runs/mine")
    with pytest.raises(NotImplementedError, match=r"jrc.restore\('path'"):
        optimizer(optax.adam(0.1)).load({})
    for name in ("stat_dict", "state_dict"):
        with pytest.raises(NotImplementedError, match=words):
            optimizer(optax.adam(0.1)).load(**{name: "runs/mine"})


def test_a_mistyped_boundary_is_a_warning_at_its_first_use(caplog):
    opt, batch = optimizer(optax.adam(0.1), ["fc1", "pred"]), next(batches(1))
    for _ in range(2):
        opt.minimize(LOSS, PARAMS, opt.init(PARAMS), batch)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "jrc.compat.RecomputeOptimizer.minimize: checkpoints must be marks of `loss`, got 'fc1' "
        "(did you mean 'fc_1'?), which is ignored. It marks 'fc_1', 'pred'."
    ]


def test_wrong_arguments():
    opt, batch = optimizer(optax.adam(0.1)), next(batches(1))
    state = opt.init(PARAMS)
    with pytest.raises(TypeError) as error:
        opt.minimize(LOSS(PARAMS, batch), PARAMS, state, batch)
    assert str(error.value) == (
        "jrc.compat.RecomputeOptimizer.minimize: loss_fn must be a function of the parameters, "
        "loss_fn(params, *args), got ArrayImpl. Pass the function, then the parameters, then its "
        "other arguments."
    )
    with pytest.raises(TypeError, match=r"got None. Start with opt_state = opt.init\(params\)"):
        opt.minimize(LOSS, PARAMS, None, batch)
    with pytest.raises(
        TypeError, match="optimizer must be an optax transform or one of jrc.compat"
    ):
        RecomputeOptimizer(0.01)
    for call in (
        lambda: opt.minimize(LOSS, PARAMS, state, batch, startup_program="main"),
        lambda: opt.backward(LOSS, PARAMS, batch, startup_program="main"),
        lambda: opt.apply_optimize(None, "main", [], PARAMS, state),
    ):
        with pytest.raises(ValueError, match="there are no programs here, got str. Initialize"):
            call()
    grad = jnp.ones((128, 2))
    for pairs, words in [
        ({"pred/w": grad}, r"list of pairs.*, got dict.*for a dict, list\(grads.items\(\)\)"),
        (None, "got NoneType. Pass the result of backward"),
        (("pred/w", grad), r"got one with str. Write \[\('layer_0/w', grad\)\]"),
        ([("pred/w", None)], "got None for 'pred/w'. Leave out the pairs of parameters without"),
    ]:
        with pytest.raises(TypeError, match=words):
            opt.apply_gradients(PARAMS, state, pairs)
    for other in (optax.sgd(0.1), optax.adamw(0.1)):
        for listed in (None, ["pred/w"]):
            with pytest.raises(TypeError, match="must be the state that this optimizer's init mak"):
                opt.minimize(LOSS, PARAMS, other.init(PARAMS), batch, parameter_list=listed)
    for pairs, words in [
        ([("fc_1", grad)], "must name parameters, got 'fc_1'.*leave out the pairs of marks"),
        ([("pred/w", grad), ("pred/w", grad)], "got 'pred/w' twice"),
        ([("pred/b", grad)], r"shape, \(2,\), got \(128, 2\) for 'pred/b'"),
    ]:
        with pytest.raises(ValueError, match=words):
            opt.apply_gradients(PARAMS, state, pairs)


def test_a_transform_that_mixes_parameters_in_one_array_is_refused():
    opt = optimizer(optax.flatten(optax.adam(0.1)))
    state, batch = opt.init(PARAMS), next(batches(1))
    assert len(opt.minimize(LOSS, PARAMS, state, batch)[3]) == 4
    words = r"got one of shape \(4482,\) for all, which would become \(384,\)"
    with pytest.raises(ValueError, match=words):
        opt.minimize(LOSS, PARAMS, state, batch, parameter_list=LISTED)
