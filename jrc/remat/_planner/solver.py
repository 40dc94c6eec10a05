"""What to keep: the whole front of choices between bytes and operations, in one pass.

A choice is a set of values to keep. Every other value that the backward pass reads is made again,
from what is kept, when the backward pass reaches the stretch that it stands in; a stretch ends
wherever nothing that is to be made again crosses over to a later one.

The program is gone through backwards. At each equation every value that has readers further on is
one of three things: kept, made again, or not needed. Behind this lie labels (bytes needed from
here on, operations), of which those remain that no other beats in both.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jrc.remat._planner.cost_graph import CostGraph, CostNode
from jrc.remat._planner.pareto import DecisionTree, Labels, ParetoFilter, falling_flops

Key = frozenset[int]


@dataclasses.dataclass(frozen=True)
class InnerOption:
    """One way to keep what a construct's derivative reads of its inside.

    Attributes:
        saved: Bytes that are kept.
        peak: Bytes that are there while it is differentiated, the kept ones included.
        flops: Operations that are done again.
        body: What says so.
    """

    saved: int
    peak: int
    flops: int
    body: Any = None


@dataclasses.dataclass(frozen=True)
class ParetoPoint:
    """One choice.

    Attributes:
        peak: Bytes needed besides arguments and results, as predicted.
        flops: Operations that are done again.
        saved: Bytes that are kept after the forward pass.
        values: The variables that are kept.
        bodies: For constructs that stand outside of all regions, by position: what is kept inside.
    """

    peak: int
    flops: int
    saved: int
    values: frozenset[int]
    bodies: Mapping[int, Any]


def solve(
    graph: CostGraph,
    options: Mapping[int, Sequence[InnerOption]] | None = None,
    times: int = 1,
    limit: int = 400,
    tiny: float = 1 / 4000,
) -> list[ParetoPoint]:
    """The front of choices for a graph, the leanest first.

    Args:
        graph: The program.
        options: By position: how constructs may be kept that stand outside of all regions.
        times: How often the program runs, every time keeping its values (the body of a loop).
        limit: About how many labels remain at one place.
        tiny: Values of a large program that are at most this share of all are kept if they are
            needed, without a look at the other way.

    Returns:
        Choices with rising peak and falling operations.
    """
    return _Solver(graph, options or {}, times, limit, tiny).front()


def spread_evenly(points: Sequence[ParetoPoint], base: int, count: int) -> list[ParetoPoint]:
    """About `count` of the points, close where bytes or operations change fast; both ends stay.

    Of one it is the leanest.
    """
    if len(points) <= count:
        return list(points)
    if count == 1:
        return [points[0]]
    # Along the curve: a tenth of the bytes counts as much as one hundredth of the operations.
    way = [0.0]
    for one, other in zip(points, points[1:], strict=False):
        memory = math.log(max(other.peak, 1) / max(one.peak, 1))
        way.append(way[-1] + abs(memory) + 10 * abs(one.flops - other.flops) / base)
    found, k = [], 0
    for i in range(count):
        while way[k] < way[-1] * i / (count - 1) - 1e-12:
            k += 1
        found.append(points[k])
    return list({id(point): point for point in [*found, points[-1]]}.values())


class _Solver:
    def __init__(
        self,
        graph: CostGraph,
        options: Mapping[int, Sequence[InnerOption]],
        times: int,
        limit: int,
        tiny: float,
    ):
        self.graph, self.options, self.times = graph, options, times
        self.steps = DecisionTree()
        total = sum(size for size, may in zip(graph.sizes, graph.may_save, strict=True) if may)
        self.tiny = 0 if all(graph.may_save) else int(total * tiny)
        self.sieve = ParetoFilter(times, limit, max(total * times, 1))

    def front(self) -> list[ParetoPoint]:
        zero = np.zeros(1)
        states = {frozenset(): Labels(zero, zero, zero, zero, np.zeros(1, int))}
        for node in reversed(self.graph.nodes):
            found: dict[Key, list[Labels]] = {}
            for key, labels in states.items():
                for new, made in self._after(node, key, labels):
                    found.setdefault(new, []).append(made)
            states = {key: self.sieve.of(labels, _is_closed(key)) for key, labels in found.items()}
            states = self._fewer(states)
        (labels,) = states.values()
        labels = falling_flops(labels.take(np.lexsort((labels.saved, labels.flops, labels.rest))))
        decisions = self.steps.backs(labels.step.tolist())
        return [self._point(labels, i, decided) for i, decided in enumerate(decisions)]

    def _point(self, labels: Labels, i: int, decided: Iterable[Any]) -> ParetoPoint:
        values, bodies = set(), {}
        for decision in decided:
            if isinstance(decision, tuple):
                bodies[decision[0]] = decision[1]
            else:
                values.add(decision)
        return ParetoPoint(
            peak=int(labels.rest[i]),
            flops=int(labels.flops[i]),
            saved=int(labels.saved[i]) * self.times,
            values=frozenset(values),
            bodies=bodies,
        )

    def _after(self, node: CostNode, key: Key, labels: Labels) -> Iterable[tuple[Key, Labels]]:
        """All that may be said of what this equation makes and reads."""
        own = [v for v in node.makes if v in node.derivative_reads]
        for new, decided in self._decided(key, labels, own):
            made = [v for v in node.makes if 2 * v in new]
            if not node.has_effects:
                yield from self._inside(node, new, decided, bool(made))
            if (node.inner_bytes is not None or node.has_effects) and not made:
                yield from self._outside(node, new, decided)

    def _inside(
        self, node: CostNode, key: Key, labels: Labels, made: bool
    ) -> Iterable[tuple[Key, Labels]]:
        """The equation as part of a stretch, run again if something that it makes is."""
        recomputed = made or bool(node.inner_bytes)
        if recomputed and node.runs_once:
            return
        needed = [v for v in node.reads if recomputed or v in node.derivative_reads]
        for new, decided in self._decided(key, labels, needed):
            inner_bytes = (node.inner_bytes or 0) if recomputed else 0
            operands = sum(size for v, size in node.operands if 2 * v in new)
            passing = sum(self.graph.passing[v] for v in node.makes if 2 * v in new)
            new, kept, remade = self._passed(node, new)
            lasting = kept + remade + inner_bytes + operands
            yield self._closed(node, new, decided, kept, lasting, passing, recomputed * node.flops)

    def _outside(self, node: CostNode, key: Key, labels: Labels) -> Iterable[tuple[Key, Labels]]:
        """The equation between two stretches, where what its derivative reads is kept."""
        needed = [v for v in node.reads if v in node.derivative_reads]
        ways = self.options.get(node.position) or [InnerOption(node.inner_bytes or 0, 0, 0)]
        for new, decided in self._decided(key, labels, needed):
            new, kept, _ = self._passed(node, new)
            if not _is_closed(new):
                continue
            for way in ways:
                step = self.steps.add(decided.step, (node.position, way.body))
                each = dataclasses.replace(decided, step=step)
                saved = kept + way.saved
                peak = max(saved, kept + way.peak)
                yield self._closed(node, new, each, saved, peak, 0, way.flops)

    def _passed(self, node: CostNode, key: Key) -> tuple[Key, int, int]:
        """What is said further up, and the bytes that this equation's values take: kept, made."""
        kept = sum(self.graph.sizes[v] for v in node.makes if 2 * v + 1 in key)
        made = sum(self.graph.remade[v] for v in node.makes if 2 * v in key)
        return key.difference({2 * v + said for v in node.makes for said in (0, 1)}), kept, made

    def _closed(
        self,
        node: CostNode,
        key: Key,
        labels: Labels,
        kept: int,
        here: int,
        passing: int,
        flops: int,
    ) -> tuple[Key, Labels]:
        cotangent_bytes = (node.cotangent_bytes if node.active else 0) + passing
        # In a loop the other turns have kept as much, whatever is further up in this one.
        others = self.times - 1
        inlined_program = (
            np.maximum(labels.open, cotangent_bytes + others * labels.saved) + here + others * kept
        )
        rest = labels.rest + self.times * kept
        if _is_closed(key):
            inlined_program, rest = (
                np.zeros_like(inlined_program),
                np.maximum(inlined_program, rest),
            )
        return key, Labels(
            inlined_program, rest, labels.flops + flops, labels.saved + kept, labels.step
        )

    def _decided(self, key: Key, labels: Labels, values: Sequence[int]) -> list[tuple[Key, Labels]]:
        """Every way to say of these values whether they are kept or made again."""
        ways = [(key, labels)]
        for v in dict.fromkeys(values):
            if 2 * v in key or 2 * v + 1 in key:
                continue
            maker = self.makers[v]
            must = maker.runs_once or self.graph.sizes[v] <= self.tiny
            may = must or self.graph.may_save[v]
            more = []
            for each, some in ways:
                if may:
                    kept = dataclasses.replace(some, step=self.steps.add(some.step, v))
                    more.append((each | {2 * v + 1}, kept))
                if not must:
                    more.append((each | {2 * v}, some))
            ways = more
        return ways

    @functools.cached_property
    def makers(self) -> dict[int, CostNode]:
        """The equation that makes each variable."""
        return {v: node for node in self.graph.nodes for v in node.makes}

    def _fewer(self, states: dict[Key, Labels], most: int = 64) -> dict[Key, Labels]:
        if len(states) <= most:
            return states
        total = max(1, sum(node.flops for node in self.graph.nodes))

        def score(item: tuple[Key, Labels]) -> float:
            labels = item[1]
            peak = np.maximum(labels.open, labels.rest)
            return float(np.min(peak / self.sieve.scale + labels.flops / total))

        closed = [item for item in states.items() if _is_closed(item[0])]
        rest = sorted((item for item in states.items() if item not in closed), key=score)
        return dict(closed + rest[: max(most - len(closed), most // 2)])


def _is_closed(key: Key) -> bool:
    """Whether nothing that is made again crosses."""
    return all(v % 2 for v in key)
