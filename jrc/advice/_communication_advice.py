"""Which way to exchange pays: dense, DGC, EF21, or few synchronisations, by a cost model."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax

from jrc._errors import public, speaking_as
from jrc._text import bandwidth_text, network_text, seconds_text, table_text
from jrc._tree import aval_of
from jrc._typing import PyTree, Real, Whole
from jrc._validate import finite_number, one_of, whole_number
from jrc.advice._dgc_advice import dgc_advice
from jrc.outer_optimizers import DiLoCo, OuterOptimizer, SparseLoCo
from jrc.outer_optimizers._internal import (
    Fragment,
    bytes_of_exchange,
    fragment_count,
    header_words,
    overlap_of,
    shapes_of_fragments,
)

OUTERS = (DiLoCo(), DiLoCo(wire="4bit"), SparseLoCo())
STREAMED = DiLoCo(wire="4bit", fragments=4, overlap=1)


class WayCost(NamedTuple):
    """The cost of one way to train.

    Attributes:
        name: `"dense"`, `"dgc"`, `"ef21"`, or the outer optimizer.
        sync_every: Steps of a round.
        bytes: Bytes that one replica sends in an exchange; of several fragments the largest.
        seconds: Mean time of a step, exchanges included.
        total: Time of all steps, seconds.
        utilisation: Share of the time in which replicas compute.
        enough: The least `sync_every` for the utilisation that was asked for, with the fragments
            and the overlap of the outer optimizer; 1 if every step will do.
    """

    name: str
    sync_every: int
    bytes: float
    seconds: float
    total: float
    utilisation: float
    enough: int


class CommunicationAdvice(NamedTuple):
    """The prediction of `jrc.communication_advice`; prints as a table and a sentence.

    Attributes:
        ways: Dense, DGC, EF21, then outer optimizers by their `sync_every`.
        best: The name of the first of them that reaches the utilisation; of the fastest if none
            does.
        utilisation: The utilisation that was asked for.
        replicas: N.
        bandwidth: Bytes per second that a replica can send.
    """

    ways: tuple[WayCost, ...]
    best: str
    utilisation: float
    replicas: int
    bandwidth: float

    def __str__(self) -> str:
        asked = f"{self.utilisation:.0%}"
        heads = ("", "", "every", "bytes", "step", "all steps", "computing", f"every, for {asked}")
        rows = [
            (
                way.name,
                "<-" if way.name == self.best else "",
                f"{way.sync_every:,}",
                network_text(way.bytes),
                seconds_text(way.seconds),
                _long_text(way.total),
                f"{way.utilisation:.1%}",
                f"{way.enough:,}",
            )
            for way in self.ways
        ]
        head = f"{self.replicas} replicas at {bandwidth_text(self.bandwidth)}"
        reached = any(
            way.name == self.best and way.utilisation >= self.utilisation for way in self.ways
        )
        why = (
            f"the first to compute {asked} of the time"
            if reached
            else (f"the fastest; none computes {asked} of the time")
        )
        return "\n".join([head, table_text(heads, rows), f"<- {self.best} is {why}."])


@public("jrc.communication_advice")
def communication_advice(
    params: PyTree,
    replicas: Whole,
    bandwidth: Real | str,
    step_time: Real,
    *,
    steps: Whole = 1,
    outers: Sequence[OuterOptimizer] | None = None,
    sparsity: Real = 0.999,
    ef21_sparsity: Real = 0.99,
    latency: Real = 0.0,
    utilisation: Real = 0.9,
    optimizer: Literal["adamw", "sgd"] | None = None,
) -> CommunicationAdvice:
    r"""Predict the time of training by dense gradients, DGC, EF21 and outer optimizers.

    $$T = \text{steps} \cdot \left(T_{\text{step}} + \frac{1}{H} \left(
    \frac{\text{bytes}}{\text{bandwidth}} + \text{latency} \right)\right)$$

    with H = 1 for dense gradients, DGC and EF21. Bytes are those that one replica sends in ring
    algorithms. Of several fragments each waits for its own bytes and latency. With `overlap=1` up
    to one step's time of each exchange is hidden, which takes a runtime that sends while it
    computes; nothing else is hidden. What a method costs in loss is not in the model: dense loses
    nothing, and more frequent exchanges lose less, so that the first way that reaches the
    utilisation is advised, in the order dense, DGC (which is momentum SGD), EF21 (for Adam), then
    `outers` by their `sync_every`. The rounds' own computation, about that of a step, is left out.

    Args:
        params: A tree of arrays or `jax.ShapeDtypeStruct`s, in the dtypes of the gradients.
        replicas: N.
        bandwidth: What one replica can send, bytes per second or text: `"1Gbit/s"`.
        step_time: Seconds of one step without exchange.
        steps: Steps of the whole run.
        outers: The outer optimizers that are weighed. By default `DiLoCo` as it is, in four bits,
            and in four bits with four fragments and overlap (where the parameters can be cut so),
            and `SparseLoCo`.
        sparsity: Of DGC.
        ef21_sparsity: Of `jrc.scale_by_ef21`.
        latency: Seconds that each exchange takes besides its bytes.
        utilisation: Share of the time in which replicas should compute, in (0, 1).
        optimizer: What the run trains with: with "adamw" DGC is left out, which is momentum SGD;
            with "sgd" EF21 is. By default both are weighed.

    Returns:
        The prediction.

    Raises:
        TypeError: When an argument is no number, or one of `outers` no outer optimizer.
        ValueError: When a number is out of its range, a unit is not known, or `optimizer` is none
            of those.

    Example:
        >>> import jax
        >>> params = jax.ShapeDtypeStruct((5000, 5000), "float32")
        >>> advice = communication_advice(params, 4, "20Mbit/s", step_time=0.5, steps=10_000)
        >>> for way in advice.ways:
        ...     print(f"{way.name} every {way.sync_every}: {way.utilisation:.0%}")
        dense every 1: 1%
        dgc every 1: 77%
        ef21 every 1: 29%
        SparseLoCo 2bit every 30: 95%
        DiLoCo f32 every 100: 45%
        DiLoCo 4bit every 100: 77%
        DiLoCo 4bit, 4 fragments, overlap every 100: 79%
        >>> advice.best
        'SparseLoCo 2bit'

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512,
    section 3.1 (compute utilisation).
    """
    replicas = whole_number(replicas, "replicas", least=1, remedy="Pass mesh.shape['data'].")
    steps = whole_number(steps, "steps", least=1, remedy="Pass those of the whole run.")
    latency = finite_number(latency, "latency", remedy="Pass seconds, such as 50e-6.")
    if optimizer is not None:
        one_of(optimizer, "optimizer", ("adamw", "sgd"))
    shapes = jax.tree.map(aval_of, params)
    outers = _usual(shapes) if outers is None else outers
    for each in outers if isinstance(outers, Sequence) else [outers]:
        is_one = isinstance(each, OuterOptimizer) and not isinstance(each, type)
        if not is_one or each is outers:
            raise TypeError(
                f"outers must be a sequence of outer optimizers, got {each!r}. Pass "
                "[jrc.SparseLoCo(sync_every=30)]."
            )
    rule = "Pass a share, such as 0.9."
    utilisation = finite_number(utilisation, "utilisation", positive=True, remedy=rule)
    if utilisation >= 1:
        raise ValueError(f"utilisation must be below 1, got {utilisation!r}. {rule}")
    remedy = "Pass that of jrc.scale_by_ef21, such as 0.99."
    ef21_sparsity = finite_number(ef21_sparsity, "ef21_sparsity", remedy=remedy)
    if ef21_sparsity >= 1:
        raise ValueError(
            f"ef21_sparsity must be a share in [0, 1), got {ef21_sparsity!r}. {remedy}"
        )
    with speaking_as("jrc.communication_advice", "jrc.dgc_advice"):
        link = params, replicas, bandwidth, step_time
        dgc = dgc_advice(*link, sparsity=sparsity, latency=latency)
        ef21 = dgc_advice(*link, sparsity=ef21_sparsity, latency=latency)
    found = [_Way("dense", 1, [dgc.uncompressed.bytes])]
    if dgc.entries:
        of_other = {"adamw": "dgc", "sgd": "ef21"}.get(str(optimizer))
        for name, each in {"dgc": dgc, "ef21": ef21}.items():
            if name == of_other:
                continue
            found.append(_Way(name, 1, [getattr(each, each.best).bytes], each.overhead))
    for outer in sorted(outers, key=lambda outer: outer.sync_every):
        parts = shapes_of_fragments(outer, shapes)
        header = header_words(Fragment(), None)
        sent = [bytes_of_exchange(outer, part, header, replicas) for part in parts]
        hidden, least = float(step_time) * overlap_of(outer), len(parts) * (1 + overlap_of(outer))
        every = int(outer.sync_every)
        found.append(_Way(_name_of(outer), every, sent, hidden=hidden, least=least))

    step_time = float(step_time)

    def cost(way: _Way) -> WayCost:
        wait = waiting_seconds(
            way.sent, dgc.bandwidth, latency=latency if replicas > 1 else 0.0, hidden=way.hidden
        )
        seconds = step_time + way.overhead + wait / way.every
        allowed = step_time * (1 / utilisation - 1) - way.overhead
        enough = math.ceil(wait / allowed - 1e-9) if allowed > 0 else 1
        share = step_time / seconds if seconds else 1.0
        enough = max(way.least, enough)
        return WayCost(way.name, way.every, max(way.sent), seconds, steps * seconds, share, enough)

    ways = tuple(cost(way) for way in found)
    good = [way for way in ways if way.utilisation >= utilisation]
    best = good[0] if good else min(ways, key=lambda way: way.seconds)
    return CommunicationAdvice(ways, best.name, utilisation, replicas, dgc.bandwidth)


def waiting_seconds(
    sent: Sequence[float], bandwidth: float, *, latency: float = 0.0, hidden: float = 0.0
) -> float:
    """Return the seconds that a replica waits for exchanges.

    Args:
        sent: Bytes of each exchange.
        bandwidth: Bytes per second that a replica can send.
        latency: Seconds that each exchange takes besides its bytes.
        hidden: Seconds of each exchange that pass behind a step.

    Returns:
        Seconds.

    >>> waiting_seconds([1e6, 3e6], 1e6, latency=0.5, hidden=2.0)
    1.5
    """
    return sum(max(0.0, nbytes / bandwidth + latency - hidden) for nbytes in sent)


class _Way(NamedTuple):
    """What a way to train takes.

    Attributes:
        name: Of the way.
        every: Steps of a round.
        sent: Bytes of each exchange of a round.
        overhead: Seconds that each step takes longer.
        hidden: Seconds of each exchange that pass behind a step.
        least: The least steps of a round that it allows.
    """

    name: str
    every: int
    sent: list[float]
    overhead: float = 0.0
    hidden: float = 0.0
    least: int = 1


def _usual(shapes: PyTree) -> tuple[OuterOptimizer, ...]:
    """Return the outer optimizers that are weighed by default."""
    try:
        shapes_of_fragments(STREAMED, shapes)
    except ValueError:  # parameters too small to be cut into so many fragments
        return OUTERS
    return (*OUTERS, STREAMED)


def _name_of(outer: OuterOptimizer) -> str:
    """Return `SparseLoCo 2bit`, of another class its name, with fragments and overlap."""
    name = f"{type(outer).__name__} {getattr(outer, 'wire', '')}".rstrip()
    count = fragment_count(outer)
    parts = f", {count} fragments" if count > 1 else ""
    return f"{name}{parts}{', overlap' if overlap_of(outer) else ''}"


def _long_text(seconds: float) -> str:
    """Seconds in hours if there are some."""
    return f"{seconds / 3600:,.3g} h" if seconds >= 3600 else seconds_text(seconds)
