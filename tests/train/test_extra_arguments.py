"""Optax transforms that take more than gradients: values, value functions, other structures."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc

PARAMS = {"b": jnp.zeros(3), "w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)}
X = jnp.sin(jnp.arange(32.0)).reshape(8, 4)
BATCH = X, jnp.cos(X[:, :3] * 3)
KEY = functools.cache(lambda: jax.random.key(0))


def loss(params, batch, key=None):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"][None]) - y) ** 2)


TRANSFORMS = {
    "reduce_on_plateau": optax.chain(
        optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1, rtol=0.9, factor=0.5)
    ),
    "polyak_sgd": optax.polyak_sgd(0.5),
    "backtracking": optax.chain(
        optax.sgd(4.0), optax.scale_by_backtracking_linesearch(10, store_grad=True)
    ),
    "lbfgs": optax.lbfgs(),
    "in MultiSteps": optax.MultiSteps(
        optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1, rtol=0.9)), 2
    ),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "sophia": optax.contrib.sophia(0.1, update_interval=2),
}  # fmt: skip


def mesh(count=2, name="data"):
    return Mesh(np.array(jax.devices()[:count]), (name,))


@functools.cache
def by_optax(name, steps):
    """The parameters after some steps of a loop as optax documents it, on one device."""
    given = TRANSFORMS[name]
    extended = isinstance(given, optax.MultiSteps)
    tx = given if extended else optax.with_extra_args_support(given)
    value_fn = functools.partial(loss, batch=BATCH)

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(value_fn)(params)
        extra = {"value": value, "grad": grad, "value_fn": value_fn}
        if name == "sophia":
            extra |= {"obj_fn": value_fn}
        updates, state = tx.update(grad, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def trained(tx, steps, over=None, fn=loss, **options):
    state = jrc.init_state(PARAMS, tx, KEY(), mesh=over)
    step = jrc.make_train_step(fn, tx, mesh=over, **options)
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return state


def assert_near(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_step_of_two_replicas_is_the_step_of_the_whole_batch(name):
    state = trained(TRANSFORMS[name], 4, mesh())
    expected, opt_state = by_optax(name, 4)
    assert_near(state.params, expected)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(opt_state)
    assert float(loss(state.params, BATCH)) < float(loss(PARAMS, BATCH))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("backtracking", {"via": "jit", "over": mesh(1), "accumulate": 4}),
        ("lbfgs", {"via": "jit", "over": mesh(1), "accumulate": 2}),
        ("lbfgs", {"via": "jit", "over": mesh(1), "memory_budget": 1.0}),
        ("polyak_sgd", {"via": "pmap", "over": mesh()}),
        ("lbfgs", {"via": "pmap", "over": mesh()}),
        ("backtracking", {"over": mesh(), "accumulate": 2}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
)
def test_other_ways_give_the_same(name, options):
    assert_near(trained(TRANSFORMS[name], 3, **options).params, by_optax(name, 3)[0])


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["compressed", "adamw", "reduce_on_plateau"])
def test_the_loss_is_reduced_once(name):
    """The report's loss, norm and residual norm are the only floats that are reduced alone."""
    first = jrc.scale_by_dgc(sparsity=0.5, min_size=8, axis_name="data")
    more = {"compressed": optax.chain(first, optax.scale(-0.1)), "adamw": optax.adamw(0.1)}
    tx = (TRANSFORMS | more)[name]
    state = jrc.init_state(PARAMS, tx, KEY(), mesh=mesh())
    text = jrc.make_train_step(loss, tx, mesh=mesh()).lower(state, BATCH).compile().as_text()
    assert "".join(re.findall(r" = (.*) all-reduce\(", text)).count("f32[]") == 3


@pytest.mark.slow
def test_parameters_that_are_split_stay_split():
    two = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    split = {"b": P(), "w": P("model")}
    params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(two, s)), PARAMS, split)
    for via in ("jit", "shard_map"):
        for name, tx in (("lbfgs", TRANSFORMS["lbfgs"]), ("look", optax.lookahead(SGD, 2, 0.5))):
            state = jrc.init_state(params, tx, KEY(), mesh=two)
            step = jrc.make_train_step(loss, tx, mesh=two, via=via)
            for _ in range(2):
                state, _ = step(state, BATCH)
            own = state.params if name == "lbfgs" else state.params.fast
            assert own["w"].sharding.spec == P("model")
            if name == "lbfgs":
                assert_near(own, by_optax("lbfgs", 2)[0])
            else:
                assert state.opt_state.fast_state[0].trace["w"].sharding.spec == P("model")


SGD = optax.sgd(0.5, 0.9)


def test_lookahead_steps_with_fast_and_slow_parameters():
    tx = optax.lookahead(SGD, sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(PARAMS)
    opt_state = tx.init(params)
    for _ in range(3):
        grads = jax.grad(loss)(params.fast, BATCH)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    state = trained(tx, 3, mesh())
    assert isinstance(state.params, optax.LookaheadParams)
    assert_near(state.params, params)
    whole = jrc.init_state(optax.LookaheadParams.init_synced(PARAMS), tx, KEY())
    assert jax.tree.structure(whole) == jax.tree.structure(state)


@pytest.mark.slow
def test_lookahead_around_a_compression():
    inner = jrc.dgc_momentum(0.5, 0.9, 0, sparsity=0.5, min_size=8, axis_name="data")
    state = trained(optax.lookahead(inner, 2, 0.5), 4, mesh())
    assert float(loss(state.params.slow, BATCH)) < float(loss(PARAMS, BATCH))
    flushed = jrc.flush(state, 0.5)
    kept = state.opt_state.fast_state[0].v["w"].mean(0)
    assert_near(flushed.params.fast["w"], state.params.fast["w"] - 0.5 * kept)
    assert bool((flushed.params.slow["w"] == state.params.slow["w"]).all())


def test_a_compression_and_what_needs_the_loss():
    first = jrc.dgc_momentum(0.5, 0.9, 0, sparsity=0.5, min_size=8, axis_name="data")
    tx = optax.chain(first, optax.contrib.reduce_on_plateau(patience=1, rtol=0.9, factor=0.5))
    state = trained(tx, 3, mesh())
    assert 0 < float(state.opt_state[1].scale) < 1


WHERE = {"w": "searched", "b": "plain"}


@pytest.mark.slow
def test_a_line_search_over_a_part_of_the_parameters():
    """The others, which `optax.partition` hides, are those of the step."""
    groups = {"searched": optax.lbfgs(), "plain": optax.set_to_zero()}
    tx = optax.partition(groups, WHERE, mask_compatible_extra_args=True)
    state = trained(tx, 3, mesh())
    own = lambda w: loss({"b": PARAMS["b"], "w": w}, BATCH)  # noqa: E731
    w, search = PARAMS["w"], optax.lbfgs()
    opt_state = search.init(w)
    for _ in range(3):
        value, grad = jax.value_and_grad(own)(w)
        updates, opt_state = search.update(grad, opt_state, w, value=value, grad=grad, value_fn=own)
        w = optax.apply_updates(w, updates)
    assert_near(state.params, {"b": PARAMS["b"], "w": w})


@pytest.mark.slow
def test_sharpness_aware_steps_with_a_gradient_of_their_own():
    make = functools.partial(optax.contrib.sam, optax.sgd(0.5), optax.sgd(0.05), sync_period=2)
    state = trained(make(opaque_mode=True), 2, mesh())
    found = trained(make(), 4, mesh())  # two steps of the loop are one of the other
    assert_near(state.params, found.params)


DROPPED = (
    "tx must hand its extra arguments on to the transform that needs {}, got a wrapper that drops "
    "them, as optax.lookahead, optax.contrib.sam and optax.contrib.split_real_and_imaginary do."
)


@pytest.mark.parametrize(
    ("wrap", "inner", "message"),
    [
        (lambda tx: optax.lookahead(tx, 2, 0.5), "polyak_sgd", DROPPED.format("'value'")),
        (
            optax.contrib.split_real_and_imaginary,
            "lbfgs",
            DROPPED.format("'value', 'grad', and 'value_fn'"),
        ),
        (lambda tx: optax.contrib.sam(tx, SGD), "polyak_sgd", DROPPED.format("'value'")),
        (optax.flatten, "backtracking", "inside of optax.flatten a line search cannot run"),
        (lambda tx: optax.masked(tx, {"b": False, "w": True}), "lbfgs", "Pass mask_compatible_ex"),
    ],
)
def test_wrappers_that_keep_extra_arguments_from_a_transform_are_told(wrap, inner, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        trained(wrap(TRANSFORMS[inner]), 1, mesh(1))


def test_a_state_that_changes_its_structure_is_told():
    norm = optax.monitor({"norm": lambda updates: optax.tree.norm(updates)})
    message = "got another one: leaf '1/measurements/norm' is not expected. Give the train state"
    with pytest.raises(TypeError, match=message):
        trained(optax.chain(SGD, norm), 1, mesh(1))


def test_what_cannot_work_is_told():
    compressed = jrc.scale_by_dgc(sparsity=0.5, min_size=8, axis_name="data")
    tx = optax.chain(compressed, optax.scale_by_backtracking_linesearch(5))
    with pytest.raises(TypeError, match="needs 'grad' and 'value_fn'. A compression gets"):
        trained(tx, 1, mesh())

    def update(updates, state, params=None, *, labels, **extra):
        return updates, state

    own = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    with pytest.raises(TypeError, match="got a transform that needs 'labels'. Bind it to the"):
        trained(own, 1, mesh(1), via="jit")
    look = optax.lookahead(SGD, 2, 0.5)
    state = jrc.init_state(optax.LookaheadParams.init_synced(PARAMS), look, KEY(), mesh=mesh())
    with pytest.raises(ValueError, match="must have optax.LookaheadParams as params .* got dict"):
        jrc.make_train_step(loss, look, mesh=mesh())(state._replace(params=PARAMS), BATCH)


def test_a_transform_that_takes_only_arguments_that_it_knows():
    """`optax.contrib.sam` says that it takes extra arguments, and refuses others."""
    tx = optax.contrib.sam(optax.sgd(0.5), optax.sgd(0.05), sync_period=2)
    assert float(loss(trained(tx, 2, mesh()).params, BATCH)) < float(loss(PARAMS, BATCH))


def test_schedule_free_evaluation_parameters():
    state = trained(TRANSFORMS["schedule_free"], 4, mesh())
    params, opt_state = by_optax("schedule_free", 4)
    found = optax.contrib.schedule_free_eval_params(state.opt_state, state.params)
    assert_near(found, optax.contrib.schedule_free_eval_params(opt_state, params))


@pytest.mark.slow
def test_inner_optimizers_of_low_communication():
    outer, over = jrc.DiLoCo(sync_every=2), mesh()
    tx = TRANSFORMS["lbfgs"]
    state = jrc.init_state(PARAMS, tx, KEY(), mesh=over, outer=outer)
    step = jrc.make_train_step(loss, tx, mesh=over, outer=outer)
    for _ in range(4):
        state, _ = step(state, BATCH)
    assert float(loss(state.params, BATCH)) < float(loss(PARAMS, BATCH))


def test_multi_steps_as_a_transform_gets_them_too():
    tx = TRANSFORMS["in MultiSteps"]
    states = [trained(given, 4) for given in (tx, tx.gradient_transformation())]
    assert jax.tree.all(jax.tree.map(np.array_equal, *(state.params for state in states)))


def test_a_step_without_rounds_is_lowered_without_options():
    state = jrc.init_state(PARAMS, optax.sgd(0.1), KEY())
    step = jrc.make_train_step(loss, optax.sgd(0.1))
    with pytest.raises(TypeError, match="options must be none without outer=, got 'number'"):
        step.lower(state, BATCH, number=7)


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_an_error_of_the_user_s_transform_is_the_user_s(error):
    """It stays as it is, whatever its text, and the update runs once."""
    calls = []

    def update(updates, state, params=None, **extra):
        calls.append(1)
        raise error("got an unexpected keyword argument 'grad'")

    own = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    for tx in (own, optax.chain(own, TRANSFORMS["backtracking"])):
        calls.clear()
        with pytest.raises(error, match="^got an unexpected keyword argument 'grad'"):
            trained(tx, 1, mesh(1))
        assert len(calls) == 1


def test_a_transform_in_a_chain_that_takes_only_arguments_that_it_knows():
    sam = optax.contrib.sam(optax.sgd(0.5), optax.sgd(0.05), sync_period=2)
    found = trained(optax.chain(sam, optax.identity()), 2, mesh()).params
    assert_near(found, trained(sam, 2, mesh()).params)
