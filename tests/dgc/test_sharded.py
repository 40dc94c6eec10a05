"""The sharded exchange: owners of entries, their sums, and what is returned to v."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jrc.dgc import Blocked, Sharded, Transfer, scale_by_dgc
from jrc.dgc._entries import BLOCK, Space
from jrc.dgc._exchanges.sharded import owners_of
from jrc.dgc._selectors.blocked import blocks_of
from jrc.dgc._selectors.top_k import GROUP
from jrc.dgc._wires import WIRES
from tests.dgc.replicas import AXIS, stepper
from tests.dgc.test_exchanges import collectives, compiled


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300_000), st.floats(0, 0.3)), min_size=1, max_size=5),
    st.integers(1, 20_000),
    st.integers(1, 70),
)
@example([(1, 0.0)], 16, 64)
@example([(3 * BLOCK, 0.3), (1, 0.0)], 16384, 4)
def test_every_entry_has_one_owner(leaves, size, replicas):
    space = Space(tuple(leaf for leaf, _ in leaves))
    counts = tuple(max(1, int(leaf * share)) for leaf, share in leaves)
    owners = owners_of(space, counts, size, replicas)
    assert len(owners.starts) == replicas and len(owners.edges) == replicas + 1
    assert owners.edges[0] == 0 and owners.edges[-1] == sum(counts)
    assert list(owners.edges) == sorted(owners.edges)
    assert owners.starts[0] == 0 and list(owners.starts) == sorted(owners.starts)
    # Where each block of the selector begins, entry after entry, in the order of sending.
    begins = []
    for start, leaf, k in zip(space.starts[:-1], space.sizes, counts, strict=True):
        blocks = blocks_of(leaf, k, size)
        for i, count in enumerate(blocks.counts):
            first = i * blocks.width * GROUP
            last = min(first + blocks.width * GROUP, leaf) - 1
            begins += [(start + first, start + last)] * count
    # All entries of an owner lie in its part, and within the blocks that a row covers.
    ends = [*owners.starts[1:], space.starts[-1]]
    for place, (begin, end) in enumerate(itertools.pairwise(owners.edges)):
        for first, last in (begins[begin], begins[end - 1]) if end > begin else ():
            assert owners.starts[place] <= first and last < ends[place]
            assert last - owners.starts[place] < owners.blocks * BLOCK
    # No owner has more than its share plus one block of the selector.
    assert owners.most <= sum(counts) / replicas + max(
        max(blocks_of(leaf, k, size).counts) for leaf, k in zip(space.sizes, counts, strict=True)
    )


def two_choices(v, k, block, replicas):
    """The exchange in NumPy: updates, and v of every replica afterwards."""
    v = v.astype(np.float64).copy()
    size = v.shape[1]
    blocks = blocks_of(size, k, block)
    owners = owners_of(Space((size,)), (k,), block, replicas)
    wide, sums = blocks.width * GROUP, np.zeros(size)
    for row in v:
        for i, count in enumerate(blocks.counts):
            part = slice(i * wide, (i + 1) * wide)
            sent = i * wide + np.argsort(-np.abs(row[part]), kind="stable")[:count]
            sums[sent] += row[sent]
            row[sent] = 0
    updates = np.zeros(size)
    for rank, start in enumerate(owners.starts):
        end = owners.starts[rank + 1] if rank + 1 < replicas else size
        best = start + np.argsort(-np.abs(sums[start:end]), kind="stable")[: owners.most]
        updates[best] = sums[best] / replicas
        sums[best] = 0
        v[rank, start:end] += sums[start:end]
    return updates, v


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("replicas", "size", "block"), [(4, 1000, 64), (8, 40, 16), (3, 777, 16)])
def test_owners_add_up_and_select_the_largest_sums(replicas, size, block):
    tx = scale_by_dgc(
        0.0,
        sparsity=0.75,
        axis_name=AXIS,
        min_size=0,
        selector=Blocked(block),
        exchange="sharded",
    )
    params = jnp.zeros(size)
    state, step = stepper(tx, params, replicas)
    rng = np.random.default_rng(size)
    own = rng.standard_normal((replicas, size)).astype(np.float32)
    # In part equal on all replicas, so that some send the same entries.
    common = rng.standard_cauchy(size).astype(np.float32)
    for gradients in (own, common + 0.01 * own, np.tile(common, (replicas, 1))):
        updates, after = jax.block_until_ready(step(gradients, state, params))
        want, kept = two_choices(gradients, size // 4, block, replicas)
        np.testing.assert_allclose(updates, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(after.v, kept, rtol=1e-5, atol=1e-6)
    # All replicas sent the same entries, so no sum was dropped.
    np.testing.assert_allclose(np.asarray(updates) + after.v.mean(0), common, rtol=1e-5)
    assert np.count_nonzero(updates) == size // 4


@pytest.mark.slow
def test_one_replica_is_a_gather():
    params = {"w": jnp.zeros(900), "x": jnp.zeros(50)}
    gradients = jax.tree.map(
        lambda p: jax.random.normal(jax.random.key(p.size), (1, *p.shape)), params
    )
    found = []
    for exchange in ("sharded", "allgather"):
        tx = scale_by_dgc(
            0.9, sparsity=0.9, axis_name=AXIS, min_size=0, selector="blocked", exchange=exchange
        )
        state, step = stepper(tx, params, 1)
        updates, state = step(gradients, state, params)
        found.append((updates, state.u, state.v))
    jax.tree.map(np.testing.assert_array_equal, *found)


def bytes_sent(replicas, wire):
    """Bytes that one replica sends to all others, from the compiled program."""
    params = jnp.zeros(8 * 1024)
    how = {"selector": Blocked(64), "wire": wire, "exchange": "sharded"}
    tx = scale_by_dgc(sparsity=0.9, axis_name=AXIS, min_size=0, **how)
    gradients = jnp.zeros((replicas, params.size))
    program, state = compiled(tx, params, gradients, replicas)
    text = program.as_text()
    there = sum(size for _, size in collectives(text, "all-to-all"))
    ((_, back),) = collectives(text, "all-gather")
    _, state = jax.block_until_ready(program(gradients, state, params))
    # The results include a replica's own row, which it does not send.
    sent = (there + back) * (replicas - 1) / replicas
    assert sent == float(state.bytes_sent)
    transfer = Transfer(Space((params.size,)), (819,), Blocked(64), WIRES[wire], replicas, AXIS)
    assert sent == 4 * (replicas - 1) * Sharded().words(transfer)
    return sent


@pytest.mark.slow
def test_bytes_do_not_grow_with_the_replicas():
    sent = {replicas: bytes_sent(replicas, "f32") for replicas in (2, 4, 8)}
    for replicas, size in sent.items():
        # At most twice the payload, less the own share; blocks are not split.
        exact = 2 * (replicas - 1) / replicas * 8 * 819
        assert exact <= size <= 1.06 * exact, sent


@pytest.mark.slow
def test_infinite_sums_leave_no_nan():
    tx = scale_by_dgc(0.0, sparsity=0.9, axis_name=AXIS, min_size=0, exchange="sharded")
    params = jnp.zeros(40)
    state, step = stepper(tx, params, 4)
    # Each is finite, so the step is taken; the sum of four is not.
    _, state = jax.block_until_ready(step(jnp.full((4, 40), 1e38), state, params))
    assert not np.isnan(state.v).any() and not np.isnan(state.u).any()
    assert np.isfinite(state.v).all()
