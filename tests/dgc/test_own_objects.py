"""A user's own selector, wire format and exchange: plain objects with the methods of a protocol."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jrc.dgc import (
    AllGather,
    Arrived,
    DenseSum,
    Entries,
    EntryExchange,
    Selector,
    Sharded,
    TensorExchange,
    Wire,
    choose_each,
    encoded,
    scale_by_dgc,
)
from jrc.dgc._selectors import SELECTORS
from jrc.dgc._wires import WIRES
from tests.dgc.replicas import AXIS, assert_bit_equal, assert_trees_close, normal, stepper

REPLICAS = 4
PARAMS = {"w": jnp.zeros((20, 10)), "x": jnp.zeros(80), "b": jnp.zeros(3)}
SENT = {"w": 50, "x": 20}


class Last:
    """Chooses the last k entries of each leaf."""

    by_leaf = True

    def choose(self, leaves, counts, space):
        def last(leaf, k):
            return jnp.arange(leaf.size - k, leaf.size, dtype=jnp.int32)

        return choose_each(last, leaves, counts, space)


class Half:
    """Writes float16 values, one in a word, and positions."""

    def words(self, entries, blocks):
        return 2 * entries

    def ordered(self, entries):
        return entries

    def encode(self, entries, blocks):
        half = lax.bitcast_convert_type(entries.values.astype(jnp.float16), jnp.uint16)
        return jnp.concatenate([half.astype(jnp.uint32), entries.positions])

    def decode(self, words, count, blocks):
        half = lax.bitcast_convert_type(words[:count].astype(jnp.uint16), jnp.float16)
        return Entries(half.astype(jnp.float32), words[count:])


@dataclasses.dataclass(frozen=True)
class GatherBySum:
    """Gathers entries as the sum of arrays in which each replica fills its own row."""

    def words(self, transfer):
        return 2 * transfer.wire.words(sum(transfer.counts), transfer.space.blocks)

    def exchange(self, entries, transfer):
        words, sent = encoded(entries, transfer)
        rank = lax.axis_index(transfer.axis)
        own = jnp.zeros((transfer.replicas, words.size), words.dtype).at[rank].set(words)
        rows = lax.psum(own, transfer.axis)
        starts = (0,) * transfer.replicas
        count, blocks = entries.values.size, transfer.space.blocks
        return Arrived(rows, count, blocks, starts, transfer.counts_by_leaf), sent


class MeanByGather:
    """Gathers whole tensors and averages them on every replica."""

    def words(self, transfer):
        return float(sum(transfer.space.sizes))

    def mean(self, tensors, axis):
        return [jnp.mean(lax.all_gather(x, axis, to="invarying"), axis=0) for x in tensors]


def stepped(steps=3, **options):
    """Gradients, and updates and states after each step, on four replicas."""
    tx = scale_by_dgc(0.0, sparsity=0.75, axis_name=AXIS, min_size=10, **options)
    state, step = stepper(tx, PARAMS, REPLICAS)
    gradients = normal(0, PARAMS, steps, REPLICAS)
    out = []
    for i in range(steps):
        now = jax.tree.map(lambda g, i=i: g[i], gradients)
        updates, state = jax.block_until_ready(step(now, state, PARAMS))
        out.append((updates, state))
    return jax.tree.map(np.asarray, gradients), out


@pytest.mark.parametrize(
    ("values", "protocol"),
    [
        ([*SELECTORS.values(), Last()], Selector),
        ([*WIRES.values(), Half()], Wire),
        ([AllGather(), Sharded(), GatherBySum()], EntryExchange),
        ([DenseSum(), MeanByGather()], TensorExchange),
    ],
)
def test_values_and_own_objects_conform_to_the_protocol(values, protocol):
    assert all(isinstance(value, protocol) for value in values)
    others = {Selector, Wire, EntryExchange, TensorExchange} - {protocol}
    assert not any(isinstance(value, tuple(others)) for value in values)


def test_own_selector():
    gradients, ((updates, state), *_) = stepped(selector=Last(), exchange="allgather")
    for name, count in SENT.items():
        mean = gradients[name][0].mean(0).reshape(-1)
        mean[:-count] = 0
        np.testing.assert_allclose(np.ravel(updates[name]), mean, atol=1e-6)
        kept = gradients[name][0].reshape(REPLICAS, -1).copy()
        kept[:, -count:] = 0
        np.testing.assert_array_equal(state.v[name].reshape(REPLICAS, -1), kept)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_own_wire(exchange):
    gradients, out = stepped(wire=Half(), exchange=exchange)
    v = {name: np.zeros((REPLICAS, PARAMS[name].size)) for name in SENT}
    for step, (updates, state) in enumerate(out):
        for name in SENT:
            v[name] = v[name] + gradients[name][step].reshape(REPLICAS, -1)
            after = np.asarray(state.v[name], np.float64).reshape(REPLICAS, -1)
            total = np.ravel(updates[name]) + after.mean(0)
            # What float16 rounds away is kept: nothing is lost.
            np.testing.assert_allclose(total, v[name].mean(0), atol=1e-6)
            v[name] = after
    sent = np.flatnonzero(updates["x"])
    rounded = np.abs(np.asarray(out[0][1].v["w"]))
    assert sent.size and ((rounded > 0) & (rounded < 1e-3)).any()


@pytest.mark.exhaustive(after=5)
@pytest.mark.slow(after=1)
@pytest.mark.parametrize("selector", ["exact", "global", Last()])
@pytest.mark.parametrize("wire", ["f32", "int8", Half()])
def test_own_exchange_of_entries(selector, wire):
    found = [
        stepped(selector=selector, wire=wire, exchange=exchange)[1]
        for exchange in ("allgather", GatherBySum())
    ]
    for (updates, state), (own_updates, own_state) in zip(*found, strict=True):
        assert_bit_equal((own_updates, own_state.u, own_state.v), (updates, state.u, state.v))
    dense = 2 * 3 / 4 * 4 * 3
    assert float(own_state.bytes_sent) - dense == 2 * (float(state.bytes_sent) - dense)


def test_own_exchange_of_tensors():
    found = [stepped(exchange=exchange)[1] for exchange in ("dense", MeanByGather())]
    for (updates, state), (own_updates, own_state) in zip(*found, strict=True):
        assert_trees_close(own_updates, updates, 1e-6)
        assert_bit_equal((own_state.u, own_state.v), (state.u, state.v))
    assert float(own_state.bytes_sent) == 3 * 4 * 280 + 2 * 3 / 4 * 4 * 3


def test_own_objects_under_a_ramp():
    args = {"selector": Last(), "wire": Half(), "exchange": GatherBySum()}
    tx = scale_by_dgc(
        0.9, sparsity=(0.5, 0.75), rampup_begin_step=1, rampup_step=2, axis_name=AXIS, min_size=10,
        **args,
    )  # fmt: skip
    state, step = stepper(tx, PARAMS, REPLICAS)
    gradients = jax.tree.map(lambda g: g[0], normal(1, PARAMS, 1, REPLICAS))
    density = []
    for _ in range(3):
        _, state = jax.block_until_ready(step(gradients, state, PARAMS))
        density.append(float(state.density))
    assert density == [1.0, 0.5, 0.25]


@pytest.mark.slow
def test_a_selector_that_returns_another_number_of_entries():
    class Short(Last):
        def choose(self, leaves, counts, space):
            return super().choose(leaves, [k - 1 for k in counts], space)

    tx = scale_by_dgc(sparsity=0.75, min_size=10, selector=Short(), exchange="allgather")
    with pytest.raises(ValueError, match=r"values must be float32\[70\], got float32\[68\]"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_a_wire_that_writes_another_number_of_words():
    class Long(Half):
        def words(self, entries, blocks):
            return entries

    tx = scale_by_dgc(sparsity=0.75, min_size=10, wire=Long(), exchange="allgather")
    with pytest.raises(ValueError, match=r"must be uint32\[70\], got uint32\[140\]"):
        tx.update(PARAMS, tx.init(PARAMS))


class AsList(Last):
    def choose(self, leaves, counts, space):
        return list(super().choose(leaves, counts, space))


class Twice(Last):
    def choose(self, leaves, counts, space):
        values, positions = super().choose(leaves, counts, space)
        return Entries(values, positions.at[1].set(positions[0]))


class SignedPositions(Last):
    def choose(self, leaves, counts, space):
        values, positions = super().choose(leaves, counts, space)
        return Entries(values, positions.astype(jnp.int32))


class NoWords(Half):
    def words(self, entries, blocks):
        return None


class OrderedAsList(Half):
    def ordered(self, entries):
        return [entries.values, entries.positions]


class HalfRead(Half):
    def decode(self, words, count, blocks):
        values, positions = super().decode(words, count, blocks)
        return Entries(values.astype(jnp.float16), positions)


@dataclasses.dataclass(frozen=True)
class Altered(AllGather):
    """An exchange whose result goes through a function."""

    change: object

    def exchange(self, entries, transfer):
        return self.change(*super().exchange(entries, transfer))


class FewMeans(MeanByGather):
    def mean(self, tensors, axis):
        return tensors[:1]


class HalfMeans(MeanByGather):
    def mean(self, tensors, axis):
        return [x.astype(jnp.bfloat16) for x in tensors]


class TextForWords(AllGather):
    def words(self, transfer):
        return "8"


GATHERED = {"exchange": "allgather"}


def altered(change):
    """An option: an exchange whose result goes through `change(arrived, sent)`."""
    return {"exchange": Altered(change)}


@pytest.mark.slow(after=6)
@pytest.mark.parametrize(
    ("options", "error", "rule", "arrived"),
    [
        (GATHERED | {"selector": AsList()}, TypeError, "selector.choose(...) must be", "list"),
        (
            GATHERED | {"selector": Twice()},
            ValueError,
            "selector.choose(...).positions must be unique",
            "150 2 times",
        ),
        (
            GATHERED | {"selector": SignedPositions()},
            ValueError,
            "selector.choose(...).positions must be uint32[70]",
            "int32[70]",
        ),
        (GATHERED | {"wire": NoWords()}, TypeError, "wire.words(...) must be a whole", "None"),
        (
            GATHERED | {"wire": OrderedAsList()},
            TypeError,
            "wire.ordered(...) must be a jrc.dgc.Entries",
            "list",
        ),
        (
            GATHERED | {"wire": HalfRead()},
            ValueError,
            "wire.decode(...).values must be float32[70]",
            "float16[70]",
        ),
        (
            {"exchange": "sharded", "wire": HalfRead()},
            ValueError,
            "wire.decode(...).values must be float32[",
            "float16[",
        ),
        (altered(lambda arrived, _: arrived), TypeError, "be a pair (Arrived, Sent)", "Arrived"),
        (
            altered(lambda arrived, sent: (sent, arrived)),
            TypeError,
            "exchange.exchange(...)[0] must be a jrc.dgc.Arrived",
            "Sent",
        ),
        (
            altered(lambda arrived, sent: (arrived._replace(words=arrived.words[0]), sent)),
            ValueError,
            "Arrived.words must be uint32[1, 140]",
            "uint32[140]",
        ),
        (
            altered(lambda arrived, sent: (arrived._replace(starts=0), sent)),
            TypeError,
            "Arrived.starts must be a sequence of positions",
            "int",
        ),
        (
            altered(lambda arrived, sent: (arrived._replace(counts=(70,)), sent)),
            ValueError,
            "Arrived.counts must be None or 2 numbers, one for each leaf, with the sum 70",
            "(70,)",
        ),
        (
            altered(lambda arrived, sent: (arrived, sent._replace(left=None))),
            TypeError,
            "Sent.left must be a jrc.dgc.Entries",
            "NoneType",
        ),
        (
            altered(lambda arrived, sent: (arrived, sent._replace(returned=sent.left[0]))),
            TypeError,
            "Sent.returned must be a jrc.dgc.Entries",
            "float32[70]",
        ),
        (
            {"exchange": FewMeans()},
            TypeError,
            "exchange.mean(...) must be a list of 2",
            "list of 1",
        ),
        (
            {"exchange": HalfMeans()},
            ValueError,
            "exchange.mean(...)[0] must be float32[1, 20, 10]",
            "bfloat16[1, 20, 10]",
        ),
        ({"exchange": TextForWords()}, TypeError, "exchange.words(...) must be a finite", "'8'"),
    ],
)
def test_a_wrong_result_of_an_own_object(options, error, rule, arrived):
    with pytest.raises(error) as raised:
        tx = scale_by_dgc(sparsity=0.75, min_size=10, **options)
        tx.update(PARAMS, tx.init(PARAMS))
    text = str(raised.value)
    assert text.startswith("jrc.scale_by_dgc: ") and rule in text and f"got {arrived}" in text
    assert text.endswith(".") and ". " in text.partition("got")[2]
