"""The names whose policy costs the fewest FLOPs in the bytes that a plan saves.

A plan that names do not say saves values without a name, or only some values of a name. Then the
names are chosen among all tags of the program: of the sets of tags whose values need about the
bytes that the plan saves in the same regions, the one that recomputes the fewest FLOPs.

What a policy recomputes follows from the cost graphs: what derivatives read is needed, and so is
what makes it, back to values that are saved and to the inputs of the region.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrc._jaxpr import Opened, Program, inner_programs, is_variable, mark_of, nbytes
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.plan.decision import (
    Loop,
    Place,
    Region,
    Stages,
    bodies,
    variable_at,
    walk,
)
from jrc.remat._planner.settings import SETTINGS

Graphs = Mapping[Any, CostGraph]
"""By its jaxpr, the cost graph of a program and of every program inside that is differentiated."""


def cheapest_names(
    program: Program, decision: Stages, opened: Opened, graphs: Graphs, offloaded: Sequence[str]
) -> tuple[str, ...]:
    """Return the tags whose policy recomputes the fewest FLOPs in the bytes that a plan saves.

    Args:
        program: The program.
        decision: What the plan saves.
        opened: The regions of the user's; if there are none, the whole function is one.
        graphs: The cost graphs.
        offloaded: The tags whose values lie in the host's memory, and are not recomputed.
    """
    times: dict[Any, tuple[Program, int]] = {}
    for inner, _, count in walk(program, decision):
        times[inner.jaxpr] = inner, count + times.get(inner.jaxpr, (inner, 0))[1]
    parts = [
        _Part(inner, graphs[key], opened, count)
        for key, (inner, count) in times.items()
        if key in graphs
    ]
    tags = dict.fromkeys(tag for part in parts for tag in part.tags.values())
    names = [tag for tag in tags if tag not in offloaded]
    most = SETTINGS.bytes_by_names * _bytes_in_regions(program, decision, opened, graphs)

    def costs(sets: Any) -> tuple[Any, Any]:
        saved = dict(zip(names, sets.T, strict=True))
        saved |= dict.fromkeys(offloaded, np.ones(len(sets), bool))
        flops, size = zip(*(part.costs(saved, offloaded) for part in parts), strict=True)
        return sum(flops), sum(size)

    chosen = _cheapest(costs, len(names), most) if names else ()
    return tuple(names[i] for i in chosen)


def _cheapest(costs: Callable[[Any], tuple[Any, Any]], count: int, most: float) -> tuple[int, ...]:
    """Return the set of fewest FLOPs within so many bytes, of equal ones that of fewest bytes.

    All sets are compared where there are few tags. Where there are many, tags are left out by and
    by, each time those that cost the fewest FLOPs for each byte that they free.

    Args:
        costs: From sets, bool[sets, tags], to the FLOPs and the bytes of each.
        count: How many tags there are.
        most: Bytes.
    """
    if count <= SETTINGS.tags_in_all_sets:
        sets = np.array(list(itertools.product([False, True], repeat=count)), bool)
        found = [(sets, *costs(sets))]
    else:
        found = list(_fewer_and_fewer(costs, count, most))
    sets, flops, size = map(np.concatenate, zip(*found, strict=True))
    fits = np.flatnonzero(size <= most)
    # Sorted by the last key first; the empty set always fits.
    order = np.lexsort((sets[fits].sum(axis=1), size[fits], flops[fits]))
    return tuple(np.flatnonzero(sets[fits[order[0]]]).tolist())


def _fewer_and_fewer(
    costs: Callable[[Any], tuple[Any, Any]], count: int, most: float
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield sets with their FLOPs and bytes: all tags, then fewer and fewer until the bytes fit.

    With each set are all those that have one tag less. Of n tags `n // tags_one_by_one` are left
    out at once: one by one would take time that grows with the cube of n.
    """
    left = np.ones((1, count), bool)
    while True:
        without = np.repeat(left, left.sum(), axis=0)
        without[np.arange(len(without)), np.flatnonzero(left[0])] = False
        sets = np.concatenate([left, without])
        flops, size = costs(sets)
        yield sets, flops, size
        freed = np.maximum(size[0] - size[1:], 0)
        # A tag that frees nothing and costs nothing goes first.
        price = (flops[1:] - flops[0]) / np.maximum(freed, 1)
        if not len(without) or (size[0] <= most and price.min() > 0):
            return
        at_once = max(1, len(without) // SETTINGS.tags_one_by_one)
        left = without[np.argsort(price, kind="stable")[:at_once]].all(axis=0, keepdims=True)


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """A program, and what a policy by names saves and recomputes of it.

    Attributes:
        program: The program.
        graph: Its cost graph.
        opened: The regions of the user's.
        times: How often it runs.
    """

    program: Program
    graph: CostGraph
    opened: Opened
    times: int

    @functools.cached_property
    def tags(self) -> dict[int, str]:
        """The names that a policy can save, by the number of the value."""
        found = ((node, self._tag(node)) for node in self.graph.nodes)
        return {node.makes[0]: tag for node, tag in found if tag and self.is_inside(node.makes[0])}

    def _tag(self, node: CostNode) -> str:
        mark = mark_of(self._eqn(node)) if node.position >= 0 else None
        return mark[0] if mark else ""

    def _eqn(self, node: CostNode) -> Any:
        return self.program.eqns[self.program.steps[node.position]]

    def is_inside(self, v: int) -> bool:
        """Whether a value is made in a region and does not leave it, so that it is not saved."""
        place = self.graph.names[v]
        return place[0] >= 0 and _is_inside(self.opened, variable_at(self.program, place))

    def costs(self, saved: Mapping[str, Any], offloaded: Sequence[str]) -> tuple[Any, Any]:
        """Return the FLOPs that are recomputed, and the bytes that are saved, for several sets.

        Args:
            saved: For each tag, whether each of the sets has it: bool[sets].
            offloaded: The tags whose bytes do not count.
        """
        flops, size = 0.0, 0.0
        tags, needed = self.tags, self._needed_in_any_case()
        for node in reversed(self.graph.nodes):
            rerun: Any = False
            for v in filter(self.is_inside, node.makes):
                need, tag = needed.get(v, False), tags.get(v, "")
                if tag and tag not in offloaded:
                    size = size + (need & saved[tag]) * (self._bytes(v) * self.times)
                rerun = rerun | (need & ~saved[tag] if tag else need)
            if rerun is not False:
                flops = flops + rerun * self._flops[node.position]
                needed |= {v: needed.get(v, False) | rerun for v in node.reads}
        zeros = np.zeros(len(next(iter(saved.values()))))
        return zeros + flops, zeros + size

    @functools.cached_property
    def _flops(self) -> dict[int, float]:
        """FLOPs of each equation; what is inside of a construct is a part of its own."""
        return {
            node.position: 0.0 if inner_programs(self._eqn(node)) else float(node.cost) * self.times
            for node in self.graph.nodes
            if node.position >= 0
        }

    def _bytes(self, v: int) -> int:
        return nbytes(variable_at(self.program, self.graph.names[v]).aval)

    def _needed_in_any_case(self) -> dict[int, Any]:
        """What derivatives read, and the results of a program that is inside of a region."""
        results = set(filter(is_variable, self.program.jaxpr.outvars))
        places = enumerate(self.graph.names)
        made = [v for v, place in places if variable_at(self.program, place) in results]
        read = (v for node in self.graph.nodes for v in node.derivative_reads)
        return dict.fromkeys([*made, *read], np.True_)


def _is_inside(opened: Opened, var: Any) -> bool:
    return not opened.count or var in opened.inside


def _bytes_in_regions(
    program: Program, decision: Stages, opened: Opened, graphs: Graphs, times: int = 1
) -> int:
    """Return the bytes that a plan saves on the device of what is made in regions.

    A loop in segments does not count: what its steps save is there for one segment alone.
    """
    graph = graphs.get(program.jaxpr)
    places = _saved_places(graph, decision) if graph else set()
    saved = (variable_at(program, place) for place in places.difference(decision.offloaded))
    values = {program.unmarked(var) for var in saved if _is_inside(opened, var)}
    total = times * sum(nbytes(var.aval) for var in values)
    for stage in decision.stages:
        segments = [part.segments for part in stage.parts] if isinstance(stage, Loop) else []
        for k, body in enumerate(bodies(program, stage)):
            if body.decision is not None and not (segments and segments[k]):
                inner = times * body.times
                total += _bytes_in_regions(body.program, body.decision, opened, graphs, inner)
    return total


def _saved_places(graph: CostGraph, decision: Stages) -> set[Place]:
    """Return what regions save, and what a derivative or a recomputation reads from elsewhere."""
    saved = {place for region in decision.regions for place in region.saved}
    nodes = {node.position: node for node in graph.nodes}
    for stage in decision.stages:
        own = {*stage.equations} if isinstance(stage, Region) else set()
        rerun = {*stage.recomputed} if isinstance(stage, Region) else set()
        for node in (nodes[k] for k in stage.equations if k in nodes):
            read = node.derivative_reads.union(node.reads if node.position in rerun else ())
            written = {graph.names[v] for v in read if not graph.is_fused(v)}
            saved |= {place for place in written if place[0] not in own}
    return saved
