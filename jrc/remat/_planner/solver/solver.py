"""The solver: the whole Pareto front of save sets between peak bytes and cost, in one pass.

A save set is a set of values to save. Every other value that the backward pass reads is recomputed
from saved ones, when the backward pass reaches the region that it lies in. A region ends wherever
no recomputed value is live.

The program is gone through backwards. At each equation, every value that has readers further on is
in one of three states: saved, recomputed, or not needed. For each combination of states the solver
holds labels, ways to get there, of which those remain that no other dominates (`pareto`):

    peak of an open region   open = max(open + early, max(cotangents + passing, early) + others)
                                    + saved + recomputed + inner + held
    peak of all behind       rest = rest + saved + held + early, and max(rest, open) where a region
                                    closes
    cost                     cost = cost + cost of the equation, if it is recomputed

where `saved` are the bytes of the equation's results that are saved, `recomputed` those that lie in
memory once recomputed, `inner` the residuals inside of it (of a loop whose steps recompute theirs
what one of them needs), `held` what a region makes the compiler hold from the start of the program
on, and `early` what loops write into, where the compiler makes that before all else. In a loop of n
steps the other n - 1 steps have saved as much, so that `saved` counts n times; `others` is what
they have saved of the equations behind, and 0 without a loop.

The front is exact for one order of the equations and one recomputation of each value, as long as
nothing is thinned. It is not where a program has more than `decide_every_value` values (only some
of them may be saved, and tiny ones are), where one equation reads more than `decided_apart`
undecided values, and where more than `labels` labels or `states` states remain.

Source: the dynamic programme of Kusumoto et al., "A Graph Theoretic Framework of Recomputation
Algorithms for Memory-Efficient Backpropagation", arXiv 1905.11722, section 4. What differs: it goes
over the prefixes of one order, and not over all lower sets of the graph; any subset of the values
that cross from one region to the next is saved, and not all of them; peaks are exact in the
max-plus form above, and the result is the whole front, and not one budget.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.costs.memory_model import shared_bytes
from jrc.remat._planner.plan.decision import has_equal_steps
from jrc.remat._planner.settings import SETTINGS, PlannerSettings
from jrc.remat._planner.solver.option import Option, spread_evenly
from jrc.remat._planner.solver.option_of_set import decision_with, left_to_jax
from jrc.remat._planner.solver.pareto import DecisionTree, Labels, ParetoFilter, falling_cost

Key = frozenset[int]
"""States of values that are live: 2 v + 1 where value v is saved, 2 v where it is recomputed."""


def solve(
    graph: CostGraph,
    options: Mapping[int, Sequence[Option]] | None = None,
    times: int = 1,
    settings: PlannerSettings = SETTINGS,
    most: int | None = None,
) -> list[Option]:
    """Return the Pareto front of a graph, the leanest option first.

    Args:
        graph: The program.
        options: By position, the options of constructs that may stand outside of all regions.
        times: How often the program runs, each time saving its values (the body of a loop).
        settings: How many labels and states remain.
        most: About how many options, evenly spread; all of the front, if not given.

    Returns:
        Options with rising peak and falling cost, of all runs together; none if no save set is
        possible.

    Raises:
        TooMuchWork: If a search takes more steps than `settings.label_steps`.
    """
    return _Solver(graph, options or {}, times, settings).front(most)


class TooMuchWork(Exception):
    """The solver has reached its bound on work, which is the same on every host."""


class _Solver:
    def __init__(
        self,
        graph: CostGraph,
        options: Mapping[int, Sequence[Option]],
        times: int,
        settings: PlannerSettings,
    ):
        self.graph, self.options, self.times = graph, options, times
        self.settings, self.tree = settings, DecisionTree()
        total = sum(size for size, may in zip(graph.sizes, graph.may_save, strict=True) if may)
        self.tiny = 0 if all(graph.may_save) else int(total * settings.tiny_share)
        self.filter = ParetoFilter(times, settings.labels, max(total * times, 1))

    def front(self, most: int | None) -> list[Option]:
        zero = np.zeros(1)
        states = {frozenset(): Labels(zero, zero, zero, zero, np.zeros(1, int))}
        work = 0
        for node in reversed(self.graph.nodes):
            work += sum(len(labels.cost) for labels in states.values())
            if work > self.settings.label_steps:
                raise TooMuchWork
            found: dict[Key, list[Labels]] = {}
            for key, labels in states.items():
                for new, some in self._before(node, key, labels):
                    found.setdefault(new, []).append(some)
            states = {
                key: self.filter.filtered(labels, _is_closed(key)) for key, labels in found.items()
            }
            states = self._fewer(states)
        if not states:
            return []
        (labels,) = states.values()
        labels = falling_cost(labels.take(np.lexsort((labels.saved, labels.cost, labels.rest))))
        every = range(len(labels.cost))
        front = (
            list(every)
            if most is None
            else spread_evenly(
                every, labels.rest.tolist(), labels.cost.tolist(), self.graph.cost, most
            )
        )
        histories = self.tree.histories(labels.step[front].tolist())
        return [
            self._option(labels, i, history) for i, history in zip(front, histories, strict=True)
        ]

    def _option(self, labels: Labels, i: int, history: Iterable[Any]) -> Option:
        values: set[int] = set()
        chosen: dict[int, Option] = {}
        inside: dict[int, Option] = {}
        for decision in history:
            if isinstance(decision, tuple):
                position, option, is_inside = decision
                (inside if is_inside else chosen)[position] = option
            else:
                values.update(decision)
        shared = shared_bytes(self.graph.results, (self.graph.sizes[v] for v in values))
        return Option(
            peak=max(int(labels.rest[i]) - shared, 0),
            saved=int(labels.saved[i]) * self.times,
            cost=int(labels.cost[i]) * self.times,
            make_decision=functools.partial(decision_with, self.graph, values, chosen, inside),
            host=sum(option.host for option in chosen.values()) * self.times,
        )

    def _before(self, node: CostNode, key: Key, labels: Labels) -> Iterable[tuple[Key, Labels]]:
        """The states before an equation, from those behind it."""
        for new, decided in self._decided(key, labels, node.late_results):
            recomputes = any(2 * v in new for v in node.makes)
            if not node.has_effects:
                yield from self._in_region(node, new, decided, recomputes)
            if (node.inner_bytes is not None or node.has_effects) and not recomputes:
                yield from self._outside(node, new, decided)

    def _in_region(
        self, node: CostNode, key: Key, labels: Labels, makes_recomputed: bool
    ) -> Iterable[tuple[Key, Labels]]:
        """The equation inside of a region; it is recomputed if one of its results is."""
        is_recomputed = makes_recomputed or bool(node.inner_bytes)
        if is_recomputed and node.runs_once:
            return
        needed = node.reads if is_recomputed else node.late_reads
        passing_bytes = self.graph.passing_bytes
        for new, decided in self._decided(key, labels, needed):
            operands = sum(size for v, size in node.operands if 2 * v in new)
            passing = sum(passing_bytes[v] for v in node.makes if 2 * v in new)
            new, saved, recomputed = self._without_results(node, new)
            is_inside = makes_recomputed or not _is_closed(new)
            held = node.held_bytes if is_inside else 0
            early = node.early_bytes + is_recomputed * node.early_again_bytes
            here, cost = saved + recomputed + operands + held, is_recomputed * node.cost
            inner = (node.inner_bytes or 0) if is_recomputed else 0
            left = cost + is_recomputed * node.inner_cost
            yield self._step(node, new, decided, saved, here + inner, passing, left, held, early)
            option = self.in_region.get(node.position) if is_recomputed else None
            if option and (option.peak < inner or option.cost < node.inner_cost):
                step = self.tree.add(decided.step, (node.position, option, True))
                some = dataclasses.replace(decided, step=step)
                cost += option.cost
                here += option.peak
                yield self._step(node, new, some, saved, here, passing, cost, held, early)

    def _outside(self, node: CostNode, key: Key, labels: Labels) -> Iterable[tuple[Key, Labels]]:
        """The equation between two regions, where all that its derivative reads is saved."""
        options = self.options.get(node.position) or [left_to_jax(node)]
        for new, decided in self._decided(key, labels, node.late_reads):
            new, results, _ = self._without_results(node, new)
            if not _is_closed(new):
                continue
            for option in options:
                step = self.tree.add(decided.step, (node.position, option, False))
                each = dataclasses.replace(decided, step=step)
                saved = results + option.saved
                peak = max(saved, results + option.peak)
                early = node.early_bytes
                yield self._step(node, new, each, saved, peak, 0, option.cost, 0, early)

    def _without_results(self, node: CostNode, key: Key) -> tuple[Key, int, int]:
        """The states before the equation, and bytes of its results: saved, and recomputed."""
        saved = sum(self.graph.sizes[v] for v in node.makes if 2 * v + 1 in key)
        recomputed = sum(self.graph.recomputed_bytes[v] for v in node.makes if 2 * v in key)
        states = {2 * v + is_saved for v in node.makes for is_saved in (0, 1)}
        return key.difference(states), saved, recomputed

    def _step(
        self,
        node: CostNode,
        key: Key,
        labels: Labels,
        saved: int,
        here: int,
        passing: int,
        cost: int,
        held: int,
        early: int,
    ) -> tuple[Key, Labels]:
        """The labels before the equation: the recurrence at the head of this file."""
        momentary = node.momentary_bytes + passing
        others = self.times - 1
        of_others = max(momentary, early) + others * labels.saved
        open_ = np.maximum(labels.open + early, of_others) + here + others * saved
        rest = labels.rest + self.times * saved + held + early
        if _is_closed(key):
            open_, rest = np.zeros_like(open_), np.maximum(open_, rest)
        return key, Labels(open_, rest, labels.cost + cost, labels.saved + saved, labels.step)

    def _decided(self, key: Key, labels: Labels, values: Sequence[int]) -> list[tuple[Key, Labels]]:
        """Every way to save or to recompute these values, where that is not decided yet.

        Of many the smallest are all saved or all recomputed, as far as they may be.
        """
        open_ = [v for v in dict.fromkeys(values) if 2 * v not in key and 2 * v + 1 not in key]
        ways = [(key, labels)]
        if not open_:
            return ways
        for group in self._decided_alike(open_):
            choices = [(v, *self._choices(v)) for v in group]
            more = []
            for each, some in ways:
                if any(may for _, _, may in choices):
                    saves = [v for v, _, may in choices if may]
                    more.append(self._way(each, some, group, saves))
                if not all(must for _, must, _ in choices):
                    saves = [v for v, must, _ in choices if must]
                    more.append(self._way(each, some, group, saves))
            ways = more
        return ways

    def _way(
        self, key: Key, labels: Labels, group: Sequence[int], saves: list[int]
    ) -> tuple[Key, Labels]:
        """These values decided: some are saved, the others recomputed."""
        if saves:
            labels = dataclasses.replace(labels, step=self.tree.add(labels.step, saves))
        if self.graph.saving_costs and (cost := sum(self.graph.saving_costs[v] for v in saves)):
            labels = dataclasses.replace(labels, cost=labels.cost + cost)
        return key | {2 * v + (v in saves) for v in group}, labels

    def _decided_alike(self, values: Sequence[int]) -> Sequence[Sequence[int]]:
        """These values one by one; of many the smallest are one group.

        A loop that nothing looks into may read a hundred.
        """
        most = self.settings.decided_apart
        if len(values) <= most:
            return [[v] for v in values]
        sizes = self.graph.sizes
        large = set(sorted(values, key=lambda v: (-sizes[v], v))[:most])
        return [*([v] for v in values if v in large), [v for v in values if v not in large]]

    def _choices(self, v: int) -> tuple[bool, bool]:
        """Whether a value must be saved, and whether it may be."""
        must = self.graph.nodes[self.makers[v]].runs_once
        is_written = not (self.graph.fuses_passes and self.graph.is_fused(v))
        must = must or (self.graph.sizes[v] <= self.tiny and is_written)
        return must, must or self.graph.may_save[v]

    @functools.cached_property
    def in_region(self) -> dict[int, Option]:
        """By position, the leanest option of each loop that may run under it in a region."""
        found = {}
        for position, options in self.options.items():
            equal = (o for o in options if has_equal_steps(o.decision) and not o.host)
            option = next(equal, None)
            if option is not None:
                found[position] = option
        return found

    @functools.cached_property
    def makers(self) -> dict[int, int]:
        """The number of the equation that makes each variable."""
        return {v: k for k, node in enumerate(self.graph.nodes) for v in node.makes}

    def _fewer(self, states: dict[Key, Labels]) -> dict[Key, Labels]:
        """The most promising states; those in which no region is open come first.

        Of the others those for lean plans, and those for cheap ones: a value that is read far
        behind (the skips of a U-Net) must be saved in the former and may be recomputed in the
        latter. Beside them are a few whose region can end soonest: else in all of them what many
        layers read may be recomputed, so that no region ever ends.
        """
        most = self.settings.states
        if len(states) <= most:
            return states
        closed = [key for key in states if _is_closed(key)]
        scores = {key: self._scores(states[key]) for key in states if not _is_closed(key)}
        orders = [
            sorted(scores, key=lambda key, i=i: scores[key][i])
            for i in range(len(self.settings.state_weights))
        ]
        mixed = dict.fromkeys(itertools.chain.from_iterable(zip(*orders, strict=True)))
        best = list(mixed)[: max(most - len(closed), most // 2)]
        ending = sorted(scores, key=lambda key: (-self._start(key), scores[key][0]))
        return {key: states[key] for key in (*closed, *best, *ending[: most // 16])}

    def _start(self, key: Key) -> int:
        """The first equation that the open region must reach."""
        return min(self.makers[v // 2] for v in key if not v % 2)

    def _scores(self, labels: Labels) -> list[float]:
        """The least sum of peak and cost among some labels, the cost weighted in several ways."""
        peak = np.maximum(labels.open, labels.rest) / self.filter.scale
        cost = labels.cost / self.graph.cost
        return [float(np.min(peak + weight * cost)) for weight in self.settings.state_weights]


def _is_closed(key: Key) -> bool:
    """Whether no recomputed value is live."""
    return all(v % 2 for v in key)
