"""The cost model: the time of a step, dense and compressed, and whether compression pays."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jrc._errors import public, speaking_as
from jrc._ring import ring_all_reduce_bytes
from jrc._tree import aval_of
from jrc._typing import PyTree, Real, Whole
from jrc._validate import finite_number, whole_number
from jrc.advice._bandwidth import bytes_per_second
from jrc.advice._dgc_advice_table import DGCAdvice, ExchangeCost
from jrc.dgc import EntryExchange, TensorExchange, Wire, scale_by_dgc
from jrc.dgc._internal import DGCConfig, checked_sparsity, fits, is_floating, plan_phases

EXTRA_PASSES = 4
"""Passes over the compressed entries, in float32, that compression adds to a step of momentum.

A whole step with exact selection takes the time of nine passes (`benchmarks/dgc/costs.py`): one of
the check for finite gradients, five of the accumulation, and selection; parameters are written only
where entries arrive. Momentum takes five at least: it reads g, u and the parameters, and writes u
and the parameters.
"""


class _Way(NamedTuple):
    """Bytes that a replica sends in one exchange, and its collectives."""

    bytes: float
    collectives: int


@public("jrc.dgc_advice")
def dgc_advice(
    params: PyTree,
    replicas: Whole,
    bandwidth: Real | str,
    step_time: Real,
    *,
    sparsity: Real | Sequence[Real] = 0.999,
    wire: Wire | str = "f32",
    exchange: EntryExchange | TensorExchange | None = None,
    min_size: Whole = 16384,
    overhead: Real | None = None,
    memory_bandwidth: Real | str = "15GB/s",
    latency: Real = 0.0,
    overlap: Real = 0.0,
) -> DGCAdvice:
    r"""Predict the time of a step, dense and compressed, and whether compression pays.

    $$T = T_{\text{step}} + T_{\text{overhead}} + \frac{\text{bytes}}{\text{bandwidth}} +
    \text{latency} \cdot \text{collectives}$$

    Bytes of a step with compression are those that `jrc.dgc_stats` would report of it: exchange and
    wire format say what they send of the k entries, and the leaves below `min_size`, with d
    entries, take `2 (N - 1) / N * 4 d` more, as DGC adds up in float32. Without compression a ring
    all-reduce sends `2 (N - 1) / N` times the bytes of the gradients, which have the parameters'
    dtypes. Without compression there is no overhead, and the share `overlap` of the all-reduce is
    hidden behind the backward pass, though never more than the time of the step; compression
    exchanges after the backward pass.

    The model leaves out the scalar of the check for finite gradients, the time to add N payloads,
    and passes that a compiler adds. Where the result is close, measure a step with and without
    compression on one replica, and pass the difference as `overhead`.

    Args:
        params: A tree of arrays or `jax.ShapeDtypeStruct`s, in the dtypes of the gradients.
        replicas: N.
        bandwidth: What one replica can send, bytes per second or text: `"1Gbit/s"`,
            `"100Mbit/s"`, `"25GB/s"`.
        step_time: Seconds of one step with momentum and without exchange.
        sparsity: Share of the entries that is kept back; of several levels, the last counts.
        wire: `"f32"` (8 bytes an entry), `"bf16"` (4), `"fp8"` or `"int8"` (3), or a value with the
            methods of `jrc.dgc.Wire`.
        exchange: One of your own, weighed besides the three of jrc and counted as one collective: a
            value with the methods of `jrc.dgc.EntryExchange` or `jrc.dgc.TensorExchange`.
        min_size: Entries from which on a leaf is compressed.
        overhead: Seconds that compression itself adds to a step. By default 4 passes more over
            4 bytes of each compressed entry than momentum needs, at `memory_bandwidth`. That is
            cautious: on a CPU XLA copies arrays in momentum SGD, and compression took less time.
        memory_bandwidth: Of one device, like `bandwidth`. The default is what two CPU cores were
            measured to read (25 million float32 in 6.6 ms); give a GPU's own.
        latency: Seconds that each collective takes besides its bytes.
        overlap: Share of the dense all-reduce that is hidden behind the backward pass, in [0, 1].

    Returns:
        The prediction.

    Raises:
        TypeError: When an argument is no number, or a leaf no array.
        ValueError: When a number is out of its range, a unit or a format is not known, or nothing
            floating is in `params`.

    Example:
        >>> params = jax.ShapeDtypeStruct((25_000_000,), "float32")
        >>> slow = dgc_advice(params, 4, "1Gbit/s", step_time=0.1)
        >>> slow.best, slow.pays, round(slow.speedup, 1)
        ('sharded', True, 10.1)
        >>> print(dgc_advice(params, 4, "100Gbit/s", step_time=0.1))
        25,000,000 entries on 4 replicas at 100 Gbit/s, each sends 25,000 entries
                           bytes sent       step
         ────────────────────────────────────────
          no compression       150 MB     112 ms
          allgather            600 kB   126.7 ms
          sharded            300.4 kB   126.7 ms
          dense                150 MB   138.7 ms
        Compression itself costs 26.67 ms a step.
        Compression does not pay: a step takes 1.13 x the time of one without.
        It would pay below 44.91 Gbit/s.

    Source: Agarwal, Wang, Venkataraman and Papailiopoulos, "On the Utility of Gradient
    Compression in Distributed Training Systems", MLSys 2022, arXiv:2103.00543: in the data centre
    few of some two hundred set-ups gained, and a model like this one predicts which.
    """
    replicas = whole_number(replicas, "replicas", least=1, remedy="Pass mesh.shape['data'].")
    rate = bytes_per_second(bandwidth, "bandwidth")
    step_time = finite_number(step_time, "step_time", remedy="Pass seconds, such as 0.1.")
    latency = finite_number(latency, "latency", remedy="Pass seconds, such as 50e-6.")
    overlap = finite_number(overlap, "overlap", remedy="Pass a share, such as 0.5.")
    if overlap > 1:
        raise ValueError(
            f"overlap must be a share in [0, 1], got {overlap!r}. Pass 0.5 for a half."
        )
    with speaking_as("jrc.dgc_advice", "jrc.scale_by_dgc"):
        counts = _counts(params, min_size)
        level = checked_sparsity(sparsity)[-1]
        ways, sent = _ways(counts, level, wire, exchange, replicas)
    if overhead is None:
        memory = bytes_per_second(memory_bandwidth, "memory_bandwidth")
        overhead = EXTRA_PASSES * 4 * counts.entries / memory
    overhead = finite_number(overhead, "overhead", remedy="Pass seconds, such as 0.01.")

    plain = ways.pop("uncompressed")
    seconds = {
        name: step_time + overhead + way.bytes / rate + latency * way.collectives
        for name, way in ways.items()
    }
    wait = plain.bytes / rate + latency * plain.collectives
    before = step_time + wait - min(overlap * wait, step_time)
    best = min(ways, key=lambda name: (seconds[name], ways[name].bytes))
    times = (step_time, overhead, latency, overlap)
    return DGCAdvice(
        uncompressed=ExchangeCost(plain.bytes, before),
        **{name: ExchangeCost(way.bytes, seconds[name]) for name, way in ways.items()},
        best=best,
        speedup=before / seconds[best] if seconds[best] else 1.0,
        pays=before > seconds[best],
        break_even=max(_break_even(plain, way, *times) for way in ways.values()),
        replicas=replicas,
        entries=counts.entries,
        sent=sent,
        bandwidth=rate,
        overhead=overhead,
    )


class _Counts(NamedTuple):
    """What the parameters come to.

    Attributes:
        sizes: Entries of each compressed leaf.
        rest: Entries of the other floating leaves.
        gradient_bytes: Bytes of all gradients.
    """

    sizes: list[int]
    rest: int
    gradient_bytes: int

    @property
    def entries(self) -> int:
        """Entries of the compressed leaves."""
        return sum(self.sizes)


def _counts(params: PyTree, min_size: Whole) -> _Counts:
    """Count entries and bytes of the floating leaves."""
    floating = [leaf for leaf in jax.tree.leaves(params) if is_floating(leaf)]
    if not floating:
        raise ValueError(
            "params must have a floating array in it, got none in "
            f"{type(params).__name__}. Pass the parameters, or their shapes from jax.eval_shape."
        )
    state = jax.eval_shape(scale_by_dgc(min_size=min_size).init, params)
    sizes = [leaf.size for leaf in jax.tree.leaves(state.u)]
    rest = sum(leaf.size for leaf in jax.tree.leaves(state.velocity))
    return _Counts(sizes, rest, sum(x.size * x.dtype.itemsize for x in map(aval_of, floating)))


def _ways(
    counts: _Counts, sparsity: float, wire: Any, own: Any, replicas: int
) -> tuple[dict[str, _Way], int]:
    """Return bytes and collectives of every exchange, and the entries that a replica sends."""
    more = 1 + (counts.rest > 0)  # the check for finite gradients, and the leaves on the dense path
    dense = ring_all_reduce_bytes(counts.gradient_bytes, replicas, itemsize=1)
    ways, sent = {"uncompressed": _Way(dense, 1 if replicas > 1 else 0)}, 0
    exchanges = {"allgather": ("allgather", 1), "sharded": ("sharded", 2), "dense": ("dense", 1)}
    for name, (exchange, collectives) in (exchanges | ({"own": (own, 1)} if own else {})).items():
        config = DGCConfig(sparsity=sparsity, wire=wire, exchange=exchange)
        number = collectives + more if replicas > 1 else 0
        if isinstance(config.exchange, EntryExchange) and not all(map(fits, counts.sizes)):
            ways[name] = _Way(math.inf, number)  # a leaf that is too large to be sent by positions
            continue
        phase = plan_phases(counts.sizes, counts.rest, replicas, config)[-1]
        sent = sum(phase.counts)
        ways[name] = _Way(phase.bytes_sent, number)
    return ways, sent


def _break_even(
    plain: _Way, way: _Way, step_time: float, overhead: float, latency: float, overlap: float
) -> float:
    """Return the bandwidth below which a step with `way` is faster than with `plain`, bytes/s.

    In x = 1 / bandwidth the time saved is the larger of two straight lines: one where `overlap`
    hides its share of the all-reduce, one where the step is too short for that.
    """
    cost = overhead + latency * way.collectives
    wait = latency * plain.collectives
    lines = (
        ((1 - overlap) * plain.bytes - way.bytes, (1 - overlap) * wait - cost),
        (plain.bytes - way.bytes, wait - step_time - cost),
    )
    crossings = [max(0.0, -gain / slope) for slope, gain in lines if slope > 0]
    if not crossings:
        return 0.0
    return 1 / min(crossings) if min(crossings) > 0 else math.inf
