"""The cost model against numbers computed by hand."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from jrc._text import bandwidth_text, network_text, seconds_text
from jrc.advice._bandwidth import bytes_per_second
from jrc.dgc import AllGather, Float32
from jrc.dgc._wires import WIRES
from tests.dgc.replicas import AXIS, stepper

# A million entries to compress, a thousand on the dense path, one byte a microsecond.
PARAMS = {"w": jax.ShapeDtypeStruct((1000, 1000), "float32"), "b": np.zeros(1000, np.float32)}
ARGS = {"params": PARAMS, "replicas": 4, "bandwidth": 1e6, "step_time": 1.0, "overhead": 0.5}


def costs(advice):
    return {
        name: tuple(getattr(advice, name))
        for name in ("uncompressed", "allgather", "sharded", "dense")
    }


def test_bytes_and_seconds_by_hand():
    advice = jrc.dgc_advice(**ARGS)
    assert (advice.replicas, advice.entries, advice.sent) == (4, 1_000_000, 1000)
    # 2 * 3/4 * 4 bytes = 6 for each entry of a ring; 8 bytes for each of 1000 entries sent. Four
    # owners: 16 blocks of 16,384 send 16 entries each and two of them one more, in both rounds.
    want = {
        "uncompressed": (6_006_000, 7.006),
        "allgather": (3 * 8000 + 6000, 1.53),
        "sharded": (2 * 3 * 8 * 258 + 6000, 1.518384),
        "dense": (6_006_000, 7.506),
    }
    for name, pair in costs(advice).items():
        assert pair == pytest.approx(want[name], rel=1e-12), name
    assert advice.best == "sharded" and advice.pays
    assert advice.speedup == pytest.approx(7.006 / 1.518384)
    # 6,006,000 - 18,384 bytes fewer in half a second.
    assert advice.break_even == pytest.approx(11_975_232)


# Bytes of an entry, and of a block of 65,536 positions, of which the million entries have 16.
@pytest.mark.parametrize(
    ("wire", "width", "block"), [("f32", 8, 0), ("bf16", 4, 4), ("fp8", 3, 8), ("int8", 3, 8)]
)
def test_bytes_of_every_wire_format(wire, width, block):
    advice = jrc.dgc_advice(**ARGS, wire=wire)
    assert advice.allgather.bytes == 3 * (width * 1000 + block * 16) + 6000
    assert advice.sharded.bytes == pytest.approx(1.5 * width * 1000 + 6000, rel=0.1)
    assert advice == jrc.dgc_advice(**ARGS, wire=WIRES[wire])
    assert advice.dense == jrc.dgc_advice(**ARGS).dense


@pytest.mark.parametrize("replicas", [2, 4, 8, 64])
def test_allgather_grows_with_the_replicas_and_sharded_does_not(replicas):
    advice = jrc.dgc_advice(**{**ARGS, "replicas": replicas})
    share = (replicas - 1) / replicas
    assert advice.allgather.bytes == pytest.approx((replicas - 1) * 8000 + share * 8000)
    # The largest of N parts has a few entries more than the mean.
    assert advice.sharded.bytes == pytest.approx(share * (16_000 + 8000), rel=0.1)


class Twice:
    """A gather of float32 entries that says that it sends everything twice."""

    def words(self, transfer):
        return 2 * AllGather().words(transfer)

    def exchange(self, entries, transfer):
        return AllGather().exchange(entries, transfer)


class Padded(Float32):
    """A wire format of a user's own: seven words more."""

    def words(self, entries, blocks):
        return super().words(entries, blocks) + 7

    def encode(self, entries, blocks):
        return jnp.pad(super().encode(entries, blocks), (0, 7))

    def decode(self, words, count, blocks):
        return super().decode(words[:-7], count, blocks)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("exchange", "wire"),
    [
        ("allgather", "f32"),
        ("sharded", "fp8"),
        ("own", Padded()),
        ("allgather", "bf16"),
        ("allgather", "int8"),
        ("sharded", "f32"),
        ("dense", "bf16"),
        ("allgather", Padded()),
    ],
)
def test_what_the_transform_counts_is_what_is_predicted(exchange, wire):
    params = {"w": jnp.ones(200_000), "x": jnp.ones(20_000), "b": jnp.ones(30)}
    own = Twice()
    given = own if exchange == "own" else exchange
    tx = jrc.scale_by_dgc(0.9, sparsity=0.99, axis_name=AXIS, exchange=given, wire=wire)
    state, step = stepper(tx, params)
    gradients = jax.tree.map(lambda p: jnp.tile(p[None], (4, 1)), params)
    _, state = jax.block_until_ready(step(gradients, state, params))
    stats = jrc.dgc_stats(state)
    advice = jrc.dgc_advice(params, 4, "1Gbit/s", 0.1, sparsity=0.99, wire=wire, exchange=own)
    assert getattr(advice, exchange).bytes == float(stats.bytes_sent)
    assert advice.uncompressed.bytes == float(stats.bytes_dense)


class Free:
    """An exchange of tensors that costs nothing."""

    def words(self, transfer):
        return 0.0

    def mean(self, tensors, axis):
        return tensors


def test_an_exchange_of_one_s_own_is_weighed_too():
    advice = jrc.dgc_advice(**ARGS, exchange=Free(), latency=0.01)
    assert advice.own == (6000, 1 + 0.5 + 0.006 + 3 * 0.01) and advice.best == "own"
    assert "  own                    6 kB   1.536 s" in str(advice)
    assert jrc.dgc_advice(**ARGS).own is None


def test_a_leaf_that_is_too_large_for_positions_can_be_sent_densely():
    huge = jax.ShapeDtypeStruct((2**31,), "float32")
    advice = jrc.dgc_advice(huge, 4, "1Gbit/s", 0.1)
    assert advice.allgather.bytes == advice.sharded.seconds == math.inf and advice.best == "dense"
    assert advice.sent == 2147483 and "allgather" in str(advice) and advice.break_even == 0


def test_overhead_is_four_passes_by_default():
    advice = jrc.dgc_advice(PARAMS, 4, 1e6, 1.0, memory_bandwidth="1MB/s")
    assert advice.overhead == 4 * 4 * 1_000_000 / 1e6
    assert jrc.dgc_advice(PARAMS, 4, 1e6, 1.0).overhead == pytest.approx(1.6e7 / 15e9)


def test_latency_counts_collectives():
    plain, late = jrc.dgc_advice(**ARGS), jrc.dgc_advice(**ARGS, latency=0.25)
    numbers = {"uncompressed": 1, "allgather": 3, "sharded": 4, "dense": 3}
    for name, number in numbers.items():
        gained = costs(late)[name][1] - costs(plain)[name][1]
        assert gained == pytest.approx(0.25 * number), name
    only = jrc.dgc_advice(**{**ARGS, "params": PARAMS["w"]}, latency=0.25)
    assert only.allgather.seconds == pytest.approx(1.5 + 0.024 + 0.25 * 2)


def test_overlap_hides_a_share_and_no_more_than_the_step():
    # 6.006 s of network: a tenth is hidden; nine tenths are longer than the step of 1 s.
    assert jrc.dgc_advice(**ARGS, overlap=0.1).uncompressed.seconds == pytest.approx(6.4054)
    assert jrc.dgc_advice(**ARGS, overlap=0.9).uncompressed.seconds == pytest.approx(6.006)
    assert jrc.dgc_advice(**ARGS, overlap=0.9).allgather == jrc.dgc_advice(**ARGS).allgather


@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("overhead", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("latency", [0.0, 0.01])
def test_it_pays_below_the_break_even_and_not_above(overlap, overhead, latency):
    args = ARGS | {"overhead": overhead}
    ask = lambda rate: jrc.dgc_advice(  # noqa: E731
        **{**args, "bandwidth": rate}, overlap=overlap, latency=latency
    )
    limit = ask(1e6).break_even
    assert 0 < limit < math.inf
    assert ask(0.999 * limit).pays and not ask(1.001 * limit).pays
    assert ask(1e3).break_even == ask(1e9).break_even


def test_cases_in_which_compression_cannot_pay():
    alone = jrc.dgc_advice(**{**ARGS, "replicas": 1})
    assert not alone.pays and alone.break_even == 0 and alone.uncompressed == (0.0, 1.0)
    assert "It would pay at no bandwidth." in str(alone)
    small = jrc.dgc_advice(**{**ARGS, "params": {"b": jnp.ones(100)}})
    assert small.entries == 0 and not small.pays and small.break_even == 0
    many = jrc.dgc_advice(**{**ARGS, "replicas": 512}, sparsity=0.75)
    # With sixty times the bytes, the gather is the slowest. Of 512 owners 16 have a block each, and
    # a row for every owner is as long as the longest.
    assert many.allgather.seconds > many.sharded.seconds > many.dense.seconds
    assert many.best == "dense"


def test_free_compression_pays_at_any_bandwidth():
    advice = jrc.dgc_advice(**{**ARGS, "overhead": 0.0})
    assert advice.break_even == math.inf and "It pays at any bandwidth." in str(advice)


def test_it_counts_what_the_transform_would_compress():
    params = {
        "w": jnp.ones((10, 10)),
        "half": jnp.ones(50, jnp.bfloat16),
        "n": jnp.arange(500),
        "none": None,
    }
    advice = jrc.dgc_advice(params, 2, 1e6, 1.0, sparsity=(0.5, 0.9), min_size=100)
    assert (advice.entries, advice.sent) == (100, 9)
    assert advice.uncompressed.bytes == 4 * 100 + 2 * 50
    assert jrc.dgc_advice(params, 2, 1e6, 1.0, min_size=0).entries == 150


def test_text():
    assert str(jrc.dgc_advice(**ARGS)).splitlines() == [
        "1,000,000 entries on 4 replicas at 8 Mbit/s, each sends 1,000 entries",
        "                   bytes sent      step",
        " ───────────────────────────────────────",
        "  no compression     6.006 MB   7.006 s",
        "  allgather             30 kB    1.53 s",
        "  sharded            18.38 kB   1.518 s",
        "  dense              6.006 MB   7.506 s",
        "Compression itself costs 500 ms a step.",
        "Compression pays: with exchange='sharded' a step is 4.61 x as quick as without.",
        "It pays below 95.8 Mbit/s.",
    ]
    fast = str(jrc.dgc_advice(**{**ARGS, "bandwidth": "25GB/s"}))
    assert "Compression does not pay: a step takes 1.5 x the time of one without." in fast
    none = str(jrc.dgc_advice(**{**ARGS, "min_size": 10**9}))
    assert "Nothing is compressed: every tensor is below min_size." in none


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1Gbit/s", 1.25e8),
        ("100Mbit/s", 1.25e7),
        (" 2.5 Gbps ", 3.125e8),
        ("25GB/s", 2.5e10),
        ("1.5kB/s", 1500.0),
        ("2MiB/s", 2.0 * 2**20),
        ("1GiB/s", 2.0**30),
        ("8bit/s", 1.0),
        ("1Tbit/s", 1.25e11),
        (7, 7.0),
        (np.float32(0.5), 0.5),
    ],
)
def test_bandwidths(text, rate):
    assert bytes_per_second(text, "bandwidth") == rate


@pytest.mark.parametrize("text", ["", "fast", "1", "1Gb/s", "1GB", "0Gbit/s", "-1GB/s", "1iB/s"])
def test_text_that_is_no_bandwidth(text):
    message = (
        "bandwidth as text must be a positive number and a unit of bits or bytes per second, got "
        f"{text!r}. Write '1Gbit/s', '100Mbit/s' or '25GB/s'."
    )
    with pytest.raises(ValueError, match=re.escape(f"jrc.dgc_advice: {message}")):
        jrc.dgc_advice(PARAMS, 4, text, 1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bandwidth": 0}, ValueError, "bandwidth must be a finite number > 0, got 0"),
        ({"bandwidth": None}, TypeError, "bandwidth must be a finite number > 0, got None"),
        ({"replicas": 0}, ValueError, "replicas must be a whole number >= 1, got 0"),
        ({"replicas": 2.0}, TypeError, "replicas must be a whole number >= 1, got 2.0"),
        ({"step_time": -1.0}, ValueError, "step_time must be a finite number >= 0, got -1.0"),
        ({"step_time": "1s"}, TypeError, "step_time must be a finite number >= 0, got '1s'"),
        ({"overhead": float("nan")}, ValueError, "overhead must be a finite number >= 0, got nan"),
        ({"latency": True}, TypeError, "latency must be a finite number >= 0, got True"),
        ({"overlap": 1.5}, ValueError, "overlap must be a share in [0, 1], got 1.5"),
        ({"wire": "f16"}, ValueError, "wire must be one of 'f32', 'bf16', 'fp8', 'int8' or an"),
        ({"exchange": "fast"}, ValueError, "exchange must be one of 'allgather'"),
        ({"sparsity": 1.0}, ValueError, "every sparsity must be a number in [0, 1), got 1.0"),
    ],
)
def test_arguments_that_do_not_fit(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        jrc.dgc_advice(**ARGS | arguments)


def test_units_in_text():
    assert [network_text(n) for n in (0, 999, 1000, 2_500_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "2.5 MB",
    ]
    assert bandwidth_text(1.25e8) == "1 Gbit/s" and bandwidth_text(0.01) == "0.08 bit/s"
    assert [seconds_text(s) for s in (0, 2.5, 0.25, 2e-5)] == ["0 s", "2.5 s", "250 ms", "20 us"]
