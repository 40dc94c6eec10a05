"""Transforms with which the replicas' parameters would differ are refused at the first step."""

import functools
import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jrc
from jrc._layout import Layout
from jrc.train._preflight.compression_axis import check_compression_axis
from jrc.train._synchronisation.compressed_chain import check_mixing

PARAMS = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
SHAPES = jax.eval_shape(lambda: PARAMS)
LARGE, SMALL = {"w": True, "b": False}, {"w": False, "b": True}
MESH = Mesh(jax.devices()[:2], ("data",))

dgc = functools.partial(jrc.scale_by_dgc, 0.9, min_size=1, sparsity=0.5, axis_name="data")
clip = functools.partial(optax.clip_by_global_norm, 0.1)
rest = optax.chain(optax.masked(optax.trace(0.9), SMALL), optax.scale(-0.1))


def scaled_by_its_own_norm(inner):
    """A wrapper that reads the local gradients beside what it wraps, as `mechanize` does."""

    def update(updates, state, params=None):
        norm = optax.tree.norm(updates)
        updates, state = inner.update(updates, state, params)
        return jax.tree.map(lambda x: x * norm, updates), state

    return optax.GradientTransformation(inner.init, update)


def scaled_in_a_loop():
    """Divides by a norm that it adds up in a loop, whose carry begins equal on all replicas."""

    def update(updates, params):
        add = lambda _, carry: carry + optax.tree.norm(updates)  # noqa: E731
        return jax.tree.map(lambda x: x / jax.lax.fori_loop(0, 3, add, 1.0), updates)

    return optax.stateless(update)


def divided_by(norm):
    """Divides local gradients by what is computed of all of them."""
    return optax.stateless(lambda updates, _: jax.tree.map(lambda x: x / norm(updates), updates))


def norm_in_a_ref(updates):
    total = jax.new_ref(jnp.zeros(()))
    for x in jax.tree.leaves(updates):
        total[...] += jnp.sum(x * x)
    return 1 + jnp.sqrt(total[...])


def last_entry(updates):
    entries = jnp.concatenate([x.ravel() for x in jax.tree.leaves(updates)])
    return 1 + jax.lax.reduce(entries, jnp.float32(0), lambda _, x: x, (0,)) ** 2


def split_by_model(updates, _):
    spec = lambda x: PartitionSpec(*(None,) * (x.ndim - 1), "model")  # noqa: E731
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec(x)), updates)


EQUAL = {
    "clipped inside of the mask": optax.chain(
        optax.masked(optax.chain(clip(), dgc()), LARGE), optax.masked(clip(), SMALL), rest
    ),
    "clipped behind": optax.chain(optax.masked(dgc(), LARGE), clip(), rest),
    "all leaves compressed": optax.chain(clip(), dgc(), optax.scale(-0.1)),
    "a ramp": optax.chain(optax.masked(dgc(sparsity=(0.5, 0.9), rampup_step=4), LARGE), rest),
    "adam behind": optax.chain(optax.masked(dgc(), LARGE), optax.adam(0.1)),
    "two transforms": optax.multi_transform(
        {"large": dgc(), "small": optax.sgd(0.1)}, {"w": "large", "b": "small"}
    ),
    "every second": optax.MultiSteps(optax.chain(optax.masked(dgc(), LARGE), rest), 2),
    "if finite": optax.apply_if_finite(optax.chain(optax.masked(dgc(), LARGE), rest), 3),
    "in some steps": optax.conditionally_mask(
        optax.chain(optax.masked(dgc(), LARGE), rest), lambda step: step % 2 == 0
    ),
    "a loop inside of the mask": optax.masked(optax.chain(scaled_in_a_loop(), dgc()), LARGE),
}


DIFFERENT = {
    "a norm beside it": optax.chain(scaled_by_its_own_norm(dgc()), optax.scale(-0.1)),
    "a norm of all leaves": optax.chain(clip(), optax.masked(dgc(), LARGE), rest),
    "a wrapped one": optax.chain(optax.chain(clip()), optax.masked(dgc(), LARGE), rest),
    "in some steps": optax.conditionally_mask(
        optax.chain(clip(), optax.masked(dgc(), LARGE), rest), lambda step: step % 2 == 0
    ),
    "every second": optax.MultiSteps(optax.chain(clip(), optax.masked(dgc(), LARGE), rest), 2),
    "a ref": optax.chain(divided_by(norm_in_a_ref), optax.masked(dgc(), LARGE), rest),
    "a reduction": optax.chain(divided_by(last_entry), optax.masked(dgc(), LARGE), rest),
    "a loop": optax.chain(scaled_in_a_loop(), optax.masked(dgc(), LARGE), rest),
}


def check(tx, axis="data", mesh=MESH):
    state, layout = jax.eval_shape(tx.init, SHAPES), Layout.of(mesh, axis)
    check_compression_axis(state, layout)
    check_mixing(tx, SHAPES, state, layout)


@pytest.mark.parametrize("name", EQUAL)
def test_transforms_with_equal_updates_are_accepted(name):
    check(EQUAL[name])


@pytest.mark.parametrize("name", DIFFERENT)
def test_transforms_that_mix_local_and_mean_gradients_are_refused(name):
    with pytest.raises(ValueError, match="different ones of 'b'.*: something before the comp"):
        check(DIFFERENT[name])


def test_a_transform_may_name_another_axis_of_the_mesh():
    mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "model"))
    specs = {"w": PartitionSpec(None, "model"), "b": PartitionSpec("model")}
    split = optax.stateless(split_by_model)
    check(optax.chain(dgc(param_specs=specs), split, optax.scale(-0.1)), mesh=mesh)


def loss(params, batch, key):
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


def first_step(tx):
    batch = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    state = jrc.init_state(PARAMS, tx, jax.random.key(0), mesh=MESH)
    return jrc.make_train_step(loss, tx, mesh=MESH)(state, batch)


def test_the_check_is_part_of_the_first_step():
    with pytest.raises(ValueError, match="put it inside of the mask: optax.masked"):
        first_step(DIFFERENT["a norm of all leaves"])


@pytest.mark.parametrize("error", [ValueError, NameError, KeyError])
def test_an_error_of_the_user_s_transform_is_not_an_axis_error(error):
    def update(updates, state, params=None):
        raise error("no table of rates")

    broken = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(error, match="no table of rates") as raised:
        first_step(optax.chain(dgc(), broken))
    assert "axis" not in str(raised.value)


@pytest.mark.parametrize(
    "axis, words", [(None, "axis_name=None, which is one replica"), ("model", "over no axis")]
)
def test_a_compression_over_another_axis_is_refused(axis, words):
    with pytest.raises(ValueError, match=f"{words}.* Pass axis_name='data' to it"):
        first_step(optax.chain(dgc(axis_name=axis), optax.scale(-0.1)))


@pytest.mark.parametrize(
    "step, own, words",
    [
        (("chip", "host"), "host", "over 'host'"),
        (("chip", "host"), ("host", "chip"), "over 'chip', 'host'"),
        ("host", ("chip", "host"), "over 'host', 'chip'"),
    ],
)
def test_a_pair_of_axes_is_compared_in_its_order(step, own, words):
    mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("host", "chip"))
    check(dgc(axis_name=step, param_specs=PartitionSpec()), step, mesh)
    with pytest.raises(ValueError, match=re.escape(f"{words}, so that the parameters")):
        check(optax.chain(dgc(axis_name=own)), step, mesh)


@pytest.mark.parametrize("make", [jrc.scale_by_dgc, jrc.scale_by_ef21])
@pytest.mark.parametrize("axis", [None, "data", ("chip", "host")])
def test_the_axis_is_part_of_the_structure_of_a_state_and_no_leaf(make, axis):
    tx = make(axis_name=axis, min_size=1)
    state, shapes = tx.init(PARAMS), jax.eval_shape(tx.init, PARAMS)
    assert state.axis.name == axis and jax.tree.structure(state) == jax.tree.structure(shapes)
    both = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))(state, state)
    assert both.axis == state.axis and jax.tree.leaves(state.axis) == []
    other = make(axis_name="other", min_size=1).init(PARAMS)
    assert jax.tree.structure(other) != jax.tree.structure(state)
    assert (
        flax.serialization.from_bytes(state, flax.serialization.to_bytes(state)).axis.name == axis
    )
    assert jrc.dgc_specs(state, "data").axis == jrc.reshard_dgc(state, 2).axis == state.axis


def test_a_run_may_go_on_over_an_axis_of_another_name():
    alone = Mesh(jax.devices()[:1], ("data",))
    state = jrc.init_state(PARAMS, dgc(), jax.random.key(0), mesh=alone)
    step = jrc.make_train_step(loss, dgc(axis_name=None), mesh=alone, via="jit")
    assert int(step(state, jnp.ones((4, 8)))[0].opt_state.step) == 1
