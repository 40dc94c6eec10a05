"""One update: skipped steps, leaves without state, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrc.dgc import dgc_stats, scale_by_dgc
from tests.dgc.replicas import AXIS, assert_bit_equal, normal, some_params, stepper

FORMS = {
    "sparse": {},
    "masked": {"exchange": "dense"},
    "dense": {"rampup_begin_step": 100},
    "switch": {"sparsity": (0.5, 0.999), "rampup_step": 4},
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_that_is_not_finite_on_one_replica_skips_the_step_on_all(form):
    params = some_params()
    gradients = normal(0, params, 3, 4)
    first, second, third = (jax.tree.map(lambda g, i=i: g[i], gradients) for i in range(3))
    tx = scale_by_dgc(0.9, axis_name=AXIS, min_size=1000, local_grad_clip_norm=5.0, **FORMS[form])
    state, step = stepper(tx, params)
    _, before = jax.block_until_ready(step(first, state, params))
    undisturbed = jax.block_until_ready(step(third, before, params))
    assert np.abs(undisturbed[0]["kernel"]).max() > 0

    for leaf, bad in (("kernel", np.nan), ("kernel", -np.inf), ("bias", np.nan), ("shift", np.inf)):
        where = (2,) + (0,) * (second[leaf].ndim - 1)
        broken = second | {leaf: second[leaf].at[where].set(bad)}
        updates, after = jax.block_until_ready(step(broken, before, params))
        assert_bit_equal(updates, jax.tree.map(jnp.zeros_like, params))
        for field in ("step", "u", "v", "velocity"):
            assert_bit_equal(getattr(after, field), getattr(before, field))
        assert int(after.skipped) == 1 and int(before.skipped) == 0

        # The next step is the one that would have come without the skipped one.
        proceeded = jax.block_until_ready(step(third, after, params))
        assert_bit_equal(proceeded[0], undisturbed[0])
        assert_bit_equal(proceeded[1]._replace(skipped=0), undisturbed[1]._replace(skipped=0))


@pytest.mark.slow
def test_leaves_without_momentum_pass_through():
    params = {
        "w": jnp.ones(300),
        "count": jnp.arange(3),
        "flag": jnp.array([True]),
        "none": None,
        "frozen": jnp.arange(2),
    }
    gradients = {
        "w": jnp.ones(300),
        "count": jnp.zeros(3, jnp.int32),
        "flag": np.zeros(1, jax.dtypes.float0),
        "none": None,
        "frozen": None,
    }
    tx = scale_by_dgc(0.9, min_size=100)
    state = tx.init(params)
    updates, after = tx.update(gradients, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert updates["none"] is None and updates["frozen"] is None
    assert updates["count"].dtype == jnp.int32 and not updates["count"].any()
    assert updates["flag"].dtype == bool and not updates["flag"].any()
    alone, _ = tx.update(gradients, state)
    assert alone["flag"].dtype == jnp.int32


@pytest.mark.parametrize("tree", [{}, (), {"n": jnp.arange(3)}, None])
def test_trees_without_floats(tree):
    tx = scale_by_dgc(0.9)
    updates, state = jax.jit(tx.update)(tree, tx.init(tree), tree)
    assert jax.tree.structure(updates) == jax.tree.structure(tree)
    assert float(dgc_stats(state).norm_kept) == 0 and int(state.step) == 1


@pytest.mark.slow
def test_scalars_and_empty_arrays():
    params = {"s": jnp.float32(2.0), "e": jnp.zeros((0, 3)), "w": jnp.ones(1)}
    tx = scale_by_dgc(0.5, sparsity=0.999, min_size=0)
    updates, state = tx.update(params, tx.init(params), params)
    assert_bit_equal(updates, params)
    assert state.u["s"].shape == (1,) and state.velocity["e"].shape == (0, 3)


def test_bfloat16_keeps_float32_state():
    params = {"w": jnp.ones((20, 30), jnp.bfloat16), "b": jnp.zeros(4, jnp.bfloat16)}
    tx = scale_by_dgc(0.9, sparsity=0.9, min_size=100, axis_name=AXIS)
    state, step = stepper(tx, params)
    gradients = jax.tree.map(lambda g: g[0], normal(0, params, 1, 4))
    updates, state = step(gradients, state, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}
    kept = (state.u, state.v, state.velocity)
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype("float32")}


def test_updates_take_the_dtype_of_the_parameters():
    params = {"w": jnp.ones(300), "b": jnp.zeros(4)}
    gradients = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    tx = scale_by_dgc(0.9, min_size=100)
    for known, dtype in ((params, "float32"), (None, "bfloat16")):
        updates, _ = tx.update(gradients, tx.init(params), known)
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
