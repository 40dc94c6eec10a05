"""Tagged operators act in a train step without any other transform of jrc."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jrc
from tests.remat.measure import operators

TX = optax.sgd(0.1)
PARAMS = {"w": jnp.asarray(np.eye(8, dtype=np.float32) / 2)}
BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def loss_fn(tags, params, batch, key):
    del key
    tag = lambda name: tags.get(name, lambda fn: fn)  # noqa: E731
    x = tag("tanh")(jnp.tanh)(batch @ params["w"])
    x = tag("sin")(jnp.sin)(x @ params["w"])
    return jnp.mean(x @ params["w"]), {"largest": jnp.max(x)}


def in_region(tags, params, batch, key):
    block = lambda params, batch: loss_fn(tags, params, batch, key)[0]  # noqa: E731
    return jrc.recompute(block, params, batch)


def run(tags, fn=loss_fn, via="shard_map", accumulate=1):
    """What one step gives, and how often each operator stands in its program."""
    mesh = Mesh(jax.devices()[: 1 if via == "jit" else 2], ("data",))
    state = jrc.init_state(PARAMS, TX, jax.random.key(0), mesh=mesh)
    step = jrc.make_train_step(
        functools.partial(fn, tags), TX, mesh=mesh, via=via, accumulate=accumulate, donate=False
    )
    new, info = step(state, BATCH)
    return jax.device_get((new.params, info.loss, info.aux)), operators(step, state, BATCH)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("via, accumulate", [("jit", 1), ("shard_map", 1), ("shard_map", 2)])
def test_a_tagged_operator_runs_once_more(via, accumulate):
    plain, before = run({}, via=via, accumulate=accumulate)
    lean, after = run({"tanh": jrc.recompute_op}, via=via, accumulate=accumulate)
    assert (before["tanh"], after["tanh"]) == (accumulate, 2 * accumulate)
    assert before["dot_general"] == after["dot_general"]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), lean, plain)


def test_each_tag_acts_on_its_own_operator():
    _, both = run({"tanh": jrc.keep_op, "sin": jrc.recompute_op})
    # The derivative of sin needs cos of its argument, so that the sine itself is not re-run.
    assert (both["tanh"], both["cos"]) == (1, 1)
    _, other = run({"tanh": jrc.recompute_op, "sin": jrc.keep_op})
    assert other["tanh"] == 2


def test_a_kept_operator_is_not_rerun_with_its_region():
    _, plain = run({}, fn=in_region)
    _, kept = run({"tanh": jrc.keep_op}, fn=in_region)
    assert (plain["tanh"], kept["tanh"]) == (2, 1)
    assert kept["dot_general"] == plain["dot_general"] - 1


def test_without_tags_the_program_has_the_same_operators():
    def lowered(fn):
        mesh = Mesh(jax.devices()[:1], ("data",))
        state = jrc.init_state(PARAMS, TX, jax.random.key(0), mesh=mesh)
        step = jrc.make_train_step(fn, TX, mesh=mesh, via="jit")
        text = step.lower(state, BATCH).as_text()
        # JAX adds up cotangents at another place of the text, in the same order.
        return text, sorted(re.sub(r"%\w+", "%", line) for line in text.splitlines())

    fn = functools.partial(loss_fn, {})
    text, lines = lowered(fn)
    assert "jrc_tag" not in text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jrc.train._step.with_op_tags", lambda fn: fn)
        assert lowered(fn)[1] == lines
