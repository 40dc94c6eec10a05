"""What a given save set needs: the recurrence of the solver, where nothing is left to decide."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.costs.memory_model import shared_bytes
from jrc.remat._planner.plan.decision import LeftToJax, Region, Stages
from jrc.remat._planner.solver.decisions import decision_of, saved_values
from jrc.remat._planner.solver.option import Option, made

Outside = dict[int, Option]
"""By position, the option of each construct that stands outside of all regions, if it can."""


def option_of_set(
    graph: CostGraph,
    saved: Collection[int],
    outside: Outside | None = None,
    times: int = 1,
    inside: Outside | None = None,
) -> Option | None:
    """Return the option that saves given values; `None` where that is not possible.

    Every other value that the backward pass reads is recomputed. What must run once is saved too.

    Args:
        graph: The program.
        saved: The values that are saved if the backward pass reads them.
        outside: The constructs outside of regions. One that stands where a recomputed value is
            live is recomputed with that region; so is one that is not among them.
        times: How often the program runs, each time saving its values (the body of a loop).
        inside: The options of loops whose steps have a decision where they are in a region.
    """
    return _Walk(graph, saved, times, inside or {}).option(outside or {})


def option_of_decision(
    graph: CostGraph, decision: Stages, options: Mapping[int, Sequence[Option]], times: int = 1
) -> Option | None:
    """Return what a decision needs by the figures of a graph; `None` where that is not possible.

    Args:
        graph: The program, with other bytes or costs than those that the decision was made for.
        decision: The decision.
        options: By position, the options of constructs in it.
        times: As for `option_of_set`.
    """
    stages = {each.equations: each for each in decision.stages if not isinstance(each, Region)}
    alone = [
        n for n in graph.nodes if (n.position,) in stages and (n.may_stand_outside or n.has_effects)
    ]
    left = all_left_to_jax(alone)
    chosen = {
        k: each
        for k, some in options.items()
        for each in reversed(some)
        if each.decision == stages.get((k,))
    }
    loops = {loop for region in decision.regions for loop in region.inside}
    inside = {k: each for k, some in options.items() for each in some if each.decision in loops}
    # What they make is there, and so are carries.
    there = graph.carries.union(v for node in alone for v in node.makes)
    saved = saved_values(graph, decision) | there
    return option_of_set(graph, saved, left | chosen, times, inside)


def left_to_jax(node: CostNode) -> Option:
    """Return the option of a construct that is left to JAX."""
    saved, decision = node.inner_bytes or 0, made(LeftToJax((node.position,)))
    return Option(0, saved, node.inner_cost, decision)


def all_left_to_jax(nodes: Iterable[CostNode]) -> Outside:
    """Return the options of the constructs among nodes, each left to JAX."""
    constructs = (node for node in nodes if node.may_stand_outside or node.has_effects)
    return {node.position: left_to_jax(node) for node in constructs}


class _Walk:
    """The walk through a program, backwards.

    Attributes:
        saves: The values that are saved if they are read.
        recomputed: The values that are read further on and are not saved.
        values: All values that are saved so far.
        open: Peak bytes of the region that is not closed yet.
        rest: Peak bytes of everything behind it.
        cost: The cost of what is recomputed.
        saved: Bytes that are saved, of one step of a loop.
    """

    def __init__(
        self, graph: CostGraph, saved: Collection[int], times: int, inside: Outside
    ) -> None:
        self.graph, self.times, self.inside = graph, times, inside
        self.saves = {v for node in graph.nodes if node.runs_once for v in node.makes}.union(saved)
        self.recomputed: set[int] = set()
        self.values: set[int] = set()
        self.open = self.rest = self.cost = self.saved = 0

    def option(self, outside: Outside) -> Option | None:
        """Return the option; `None` if what must run once would be recomputed."""
        chosen: dict[int, Option] = {}
        for node in reversed(self.graph.nodes):
            self._need(node.late_results)
            option = outside.get(node.position)
            if option is None and node.has_effects:
                option = left_to_jax(node)
            if option is not None and self._stands_outside(node):
                chosen[node.position] = option
                self._leave(node, option)
            elif node.has_effects or not self._recompute(node):
                return None
        saved = (self.graph.sizes[v] for v in self.values)
        return Option(
            peak=max(self.rest - shared_bytes(self.graph.results, saved), 0),
            saved=self.saved * self.times,
            cost=self.cost * self.times,
            make_decision=functools.partial(
                decision_with, self.graph, self.values, chosen, self.inside
            ),
            host=sum(option.host for option in chosen.values()) * self.times,
        )

    def _need(self, values: Iterable[int]) -> None:
        for v in values:
            if v not in self.saves:
                self.recomputed.add(v)
            elif v not in self.values:
                self.values.add(v)
                self.cost += self.graph.saving_costs[v] if self.graph.saving_costs else 0

    def _stands_outside(self, node: CostNode) -> bool:
        """Whether no recomputed value is live around an equation, nor read by its derivative."""
        return not self.recomputed and self.saves.issuperset(node.late_reads)

    def _leave(self, node: CostNode, option: Option) -> None:
        """Step over an equation outside of all regions."""
        results = self._saved_results(node)
        self._need(node.late_reads)
        saved = results + option.saved
        self.cost += option.cost
        peak = max(saved, results + option.peak)
        self._step(node.momentary_bytes, saved, peak, early=node.early_bytes)

    def _recompute(self, node: CostNode) -> bool:
        """Step over an equation in a region; return whether that is possible."""
        graph, made_again = self.graph, self.recomputed.intersection(node.makes)
        is_recomputed = bool(made_again or node.inner_bytes)
        if is_recomputed and node.runs_once:
            return False
        self._need(node.reads if is_recomputed else node.late_reads)
        results = self._saved_results(node)
        here = results + sum([graph.recomputed_bytes[v] for v in made_again])
        here += sum([size for v, size in node.operands if v not in self.saves])
        if is_recomputed:
            option = self.inside.get(node.position)
            here += option.peak if option else node.inner_bytes or 0
            self.cost += node.cost + (option.cost if option else node.inner_cost)
        passing = sum([graph.passing_bytes[v] for v in made_again])
        self.recomputed -= made_again
        held = node.held_bytes if made_again or self.recomputed else 0
        early = node.early_bytes + is_recomputed * node.early_again_bytes
        self._step(node.momentary_bytes + passing, results, here + held, held, early)
        return True

    def _saved_results(self, node: CostNode) -> int:
        return sum([self.graph.sizes[v] for v in node.makes if v in self.values])

    def _step(self, momentary: int, saved: int, here: int, held: int = 0, early: int = 0) -> None:
        """The recurrence at the head of `solver.py`, of one label."""
        others = self.times - 1
        of_others = max(momentary, early) + others * self.saved
        self.open = max(self.open + early, of_others) + here + others * saved
        self.rest += self.times * saved + held + early
        if not self.recomputed:
            self.open, self.rest = 0, max(self.open, self.rest)
        self.saved += saved


def decision_with(
    graph: CostGraph,
    values: Collection[int],
    outside: Mapping[int, Option],
    inside: Mapping[int, Option],
) -> Stages:
    """Return the decision that saves values, with an option of each of some constructs.

    Args:
        graph: The program.
        values: The values that are saved.
        outside: The options of constructs outside of all regions, by position.
        inside: Those of loops inside of them.
    """
    stages = {k: option.decision for k, option in outside.items()}
    loops: dict[int, Any] = {k: option.decision for k, option in inside.items()}
    return decision_of(graph, frozenset(values), stages, loops)
