"""Trees with more entries than 31 bits number: their shapes alone, and small ones in parts."""

import jax
import jax.numpy as jnp
import pytest

from jrc.dgc import _entries, scale_by_dgc
from jrc.dgc._entries import MOST_ENTRIES, Space, buckets_of
from jrc.dgc._selectors.threshold import sample_of
from tests.dgc.replicas import AXIS, assert_bit_equal, assert_trees_close, normal, stepper

WAYS = {
    "allgather": {"exchange": "allgather"},
    "global bf16": {"exchange": "allgather", "selector": "global", "wire": "bf16"},
    "sharded": {"exchange": "sharded"},
    "auto": {},
}


def shapes_of_a_step(sizes, **options):
    tx = scale_by_dgc(sparsity=0.999, **options)
    params = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    return [update.size for update in updates]


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(2**31 - 1,), (2**30,) * 3])
def test_a_tree_may_have_more_entries_than_a_leaf(way, sizes):
    assert shapes_of_a_step(sizes, **WAYS[way]) == list(sizes)


@pytest.mark.parametrize("exchange", ["dense", "auto"])
def test_a_dense_sum_has_no_limit(exchange):
    assert shapes_of_a_step([2**31, 2**31 + 5], exchange=exchange) == [2**31, 2**31 + 5]


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_a_leaf_too_large_for_positions(exchange):
    message = "must have at most 2,147,483,647 entries, got 2,147,483,648. Split the leaf, or pass"
    with pytest.raises(ValueError, match=message):
        shapes_of_a_step([2**31], exchange=exchange)


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ((5,), [(0, 1)]),
        ((2**30, 2**30 - 1), [(0, 2)]),
        ((2**30, 2**30, 1), [(0, 1), (1, 3)]),
        ((1, MOST_ENTRIES, 1, 1), [(0, 1), (1, 2), (2, 4)]),
    ],
)
def test_buckets_golden(sizes, buckets):
    found = buckets_of(sizes)
    assert [(part.start, part.stop) for part in found] == buckets
    assert all(Space(sizes[part]).starts[-1] <= 2**31 for part in found)


@pytest.mark.exhaustive(after=1)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["allgather", "sharded"])
def test_buckets_send_what_one_bucket_sends(way, monkeypatch):
    params = {"a": jnp.zeros(300), "b": jnp.zeros((20, 10)), "c": jnp.zeros(70), "d": jnp.zeros(3)}
    gradients = jax.tree.map(lambda g: g[0], normal(0, params, 1, 4))
    options = WAYS[way] | {"sparsity": 0.9, "axis_name": AXIS, "min_size": 10}
    found = []
    for most in (_entries.MOST_BLOCKS, 1):
        monkeypatch.setattr(_entries, "MOST_BLOCKS", most)
        state, step = stepper(scale_by_dgc(0.9, **options), params)
        updates, state = jax.block_until_ready(step(gradients, state, params))
        found.append((updates, state.u, state.v))
    if way == "allgather":
        assert_bit_equal(*found)
        return
    # Other owners get a bucket's entries, and other sums stay in v: together they are the same.
    totals = [
        {name: updates[name].reshape(-1) + v[name].mean(0).reshape(-1) for name in "abc"}
        for updates, _, v in found
    ]
    assert_trees_close(*totals, 1e-6)
    assert all(jnp.count_nonzero(updates[name]) for updates, _, _ in found for name in "abc")


@pytest.mark.slow
def test_a_sample_without_flat_indices_is_the_same_sample(monkeypatch):
    values = jnp.arange(1003.0)
    whole = sample_of(values, 10)
    monkeypatch.setattr(_entries, "MOST_ENTRIES", 1000)
    parts = sample_of(values, 10)
    assert (whole.size, parts.size) == (101, 100)
    assert_bit_equal(parts, whole[:100])
