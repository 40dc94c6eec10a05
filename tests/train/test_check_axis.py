"""Transforms that would let replicas drift apart are refused before the first step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jrc
from jrc.train._check_axis import check_axis

PARAMS = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
SHAPES = jax.eval_shape(lambda: PARAMS)
LARGE, SMALL = {"w": True, "b": False}, {"w": False, "b": True}
MESH = Mesh(jax.devices()[:2], ("data",))

dgc = functools.partial(jrc.scale_by_dgc, 0.9, min_size=1, sparsity=0.5, axis_name="data")
clip = functools.partial(optax.clip_by_global_norm, 0.1)
rest = optax.chain(optax.masked(optax.trace(0.9), SMALL), optax.scale(-0.1))

TOGETHER = {
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
}
APART = {
    "a norm of all leaves": optax.chain(clip(), optax.masked(dgc(), LARGE), rest),
    "a wrapped one": optax.chain(optax.chain(clip()), optax.masked(dgc(), LARGE), rest),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_stays_together_is_taken(name):
    check_axis(TOGETHER[name], SHAPES, "data", MESH)


@pytest.mark.parametrize("name", APART)
def test_what_mixes_local_and_shared_gradients_is_refused(name):
    with pytest.raises(ValueError, match="of 'b' it differs, because something before the comp"):
        check_axis(APART[name], SHAPES, "data", MESH)


def test_the_first_step_asks():
    def loss(params, batch, key):
        return jnp.mean((batch @ params["w"] + params["b"]) ** 2)

    batch = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    tx = APART["a norm of all leaves"]
    state = jrc.init_state(PARAMS, tx, jax.random.key(0), mesh=MESH)
    with pytest.raises(ValueError, match="Put it inside of the mask: optax.masked"):
        jrc.make_train_step(loss, tx, mesh=MESH)(state, batch)
