"""`dgc_momentum`: its arguments, its schedule where a step is skipped, its place in a chain."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jrc
from jrc.dgc import apply_gradients
from tests.dgc.replicas import AXIS, assert_bit_equal, mesh

PARAMS = {"w": jnp.ones((20, 10)), "b": jnp.ones(3)}


def test_the_signatures_list_every_option():
    own = inspect.signature(jrc.scale_by_dgc).parameters
    alias = inspect.signature(jrc.dgc_momentum).parameters
    assert {*alias} == {*own, "learning_rate"} and {
        *inspect.signature(jrc.scale_by_ef21).parameters
    } < {
        *own,
        "momentum_rate",
    }
    for name, argument in own.items():
        # Paddle's signature has these two first and without defaults.
        if name not in ("momentum", "rampup_begin_step"):
            assert alias[name].default == argument.default
        assert alias[name].annotation == argument.annotation


def test_an_option_that_is_not_known_is_named():
    with pytest.raises(
        TypeError, match=r"scale_by_dgc\(\) got an unexpected keyword .* 'momentun'"
    ):
        jrc.scale_by_dgc(momentun=0.9)
    with pytest.raises(TypeError, match=r"dgc_momentum\(\) missing a required .* 'momentum'"):
        jrc.dgc_momentum(0.1)


@pytest.mark.parametrize("how", ["update", "apply"])
def test_a_skipped_step_does_not_advance_the_schedule(how):
    tx = jrc.dgc_momentum(optax.linear_schedule(1.0, 0.0, 4), 0.9, 0, sparsity=0.9, min_size=100)

    @jax.jit
    def step(params, state, gradients):
        if how == "apply":
            return apply_gradients(tx, gradients, state, params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    broken = PARAMS | {"b": PARAMS["b"].at[1].set(jnp.nan)}
    params, state = step(PARAMS, tx.init(PARAMS), PARAMS)
    assert int(state[1].count) == 1
    after, skipped = step(params, state, broken)
    assert int(skipped[1].count) == 1 and int(skipped[0].skipped) == 1
    assert_bit_equal(after, params)
    # The next step is the one that would have come without the skipped one.
    assert_bit_equal(step(params, skipped, PARAMS)[0], step(params, state, PARAMS)[0])


@pytest.mark.parametrize("names", [("first", "second"), ("z", "a")])
def test_what_stands_in_front_of_the_compression_has_no_state(names):
    def chain(*transforms):
        return optax.named_chain(*zip(names, transforms, strict=True))

    def start(tx):
        return jrc.init_state(PARAMS, tx, jax.random.key(0), mesh=mesh())

    compress = jrc.scale_by_dgc(axis_name=AXIS, min_size=100)
    with pytest.raises(ValueError, match="jrc.init_state: .* before the compression"):
        start(chain(optax.trace(0.9), compress))
    inside = chain(optax.clip(1.0), chain(optax.scale_by_adam(), compress))
    with pytest.raises(ValueError, match="jrc.init_state: .* before the compression"):
        start(inside)
    start(chain(compress, optax.trace(0.9)))
    start(chain(optax.clip(1.0), compress))


def test_bytes_of_an_all_reduce_are_those_of_its_dtype():
    for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
        params = {"w": jnp.ones((20, 10), dtype), "b": jnp.ones(4, dtype)}
        tx = optax.sgd(0.1)
        state = jrc.init_state(params, tx, jax.random.key(0), mesh=mesh())

        def loss(params, batch, key):
            return jnp.sum(params["w"] * params["b"].sum()).astype(jnp.float32) * jnp.mean(batch)

        step = jrc.make_train_step(loss, tx, mesh=mesh(), donate=False)
        _, info = jax.block_until_ready(step(state, np.ones((4, 1), np.float32)))
        assert float(info.bytes_sent) == 2 * 3 / 4 * itemsize * 204
