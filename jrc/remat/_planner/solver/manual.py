"""Manual plans: what a person would write, as options beside those of the solver.

Two kinds of them: a policy of `jax.checkpoint` that saves products or marked values, and the
program cut into regions, each under a `jax.checkpoint`. Cuts are where few bytes cross from the
equations in front to those behind: the local minima, at a few scales.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jrc._jaxpr import Program, primitive_name
from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.costs.memory_model import kept_by_xla
from jrc.remat._planner.plan.decision import LeftToJax, Region, Stages
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.decisions import decision_of_regions, recomputed_cost
from jrc.remat._planner.solver.option import Option
from jrc.remat._planner.solver.save_sets import (
    IN_CHUNKS,
    MARKS,
    NOTHING_SAVED,
    distinct,
    marked_values,
    policy_sets,
)
from jrc.remat._planner.solver.solver import solve

Options = Mapping[int, Sequence[Option]]
Regions = tuple[range, ...]
"""Parts of a program, as ranges of the nodes of its graph."""


def manual_options(program: Program, graph: CostGraph, options: Options) -> list[Option]:
    """Return the manual plans of a program; of equal ones the first.

    Args:
        program: The program.
        graph: Its cost graph.
        options: By position, the options of constructs outside of all regions.
    """
    found = [*_by_policy(program, graph, options), *_inside_constructs(program, graph, options)]
    for name, regions in _all_regions(program, graph).items():
        found += _under_checkpoints(program, graph, name, regions, options)
    return list({each.decision: each for each in reversed(found)}.values())[::-1]


def crossing_bytes(graph: CostGraph) -> list[int]:
    """Return, for each place between two nodes, the bytes of the values that cross it."""
    last = {v: k for k, node in enumerate(graph.nodes) for v in node.reads}
    change = [0] * (len(graph.nodes) + 2)
    for k, node in enumerate(graph.nodes):
        for v in (v for v in node.makes if v in last):
            change[k + 1] += graph.sizes[v]
            change[last[v] + 1] -= graph.sizes[v]
    return list(itertools.accumulate(change))[:-1]


def cuts(graph: CostGraph, regions: int) -> list[int]:
    """Return the places where fewest bytes cross, at the scale of about so many regions.

    Each is the minimum of all places within half a region, by the bytes that the equations make. Of
    equal ones it is the last: a block ends with what its layer returns.

    Args:
        graph: The cost graph.
        regions: A share of the bytes: one over this.
    """
    crossing = np.array(crossing_bytes(graph))
    made = (
        sum(graph.sizes[v] for v in node.makes if not graph.is_fused(v)) for node in graph.nodes
    )
    at = list(itertools.accumulate(made, initial=0))
    reach = at[-1] / regions / 2
    found: list[int] = []
    for k in sorted(range(1, len(graph.nodes)), key=lambda k: (crossing[k], -k)):
        near = slice(bisect.bisect_left(at, at[k] - reach), bisect.bisect_right(at, at[k] + reach))
        i = bisect.bisect(found, k)
        is_apart = all(abs(at[other] - at[k]) > reach for other in found[max(i - 1, 0) : i + 1])
        if is_apart and crossing[k] <= crossing[near].min():
            found.insert(i, k)
    return found


def _by_policy(program: Program, graph: CostGraph, options: Options) -> Iterator[Option]:
    """What policies of `jax.checkpoint` save, the regions as the solver would cut them."""
    sets = {"everything recomputed": frozenset[int]()}
    sets |= {f"{name} saved": values for name, values in policy_sets(program, graph).items()}
    for name, values in distinct(sets).items():
        for option in solve(graph, options, saved=values)[:1]:
            yield dataclasses.replace(option, name=name)


def _all_regions(program: Program, graph: CostGraph) -> dict[str, Regions]:
    """The ways to cut a program into regions, by name; the last region is recomputed or not."""
    count = len(graph.nodes)
    found: dict[Regions, str] = {}
    marks = [k for k in _behind_marks(program, graph) if k < count]
    scales = [cuts(graph, regions) for regions in SETTINGS.cut_regions]
    for name, places in (("marks", marks), *(("", scale) for scale in scales)):
        regions = tuple(itertools.starmap(range, itertools.pairwise([0, *places, count])))
        title = "regions between marks" if name else f"{len(places)} regions"
        if len(regions) > 1:
            found.setdefault(regions[:-1], f"{title} recomputed")
            found.setdefault(regions, f"{title} recomputed, the last too")
    return {name: regions for regions, name in found.items()}


def _under_checkpoints(
    program: Program, graph: CostGraph, name: str, regions: Regions, options: Options
) -> Iterator[Option]:
    """A `jax.checkpoint` around each region: bare, with products saved, with constructs beside.

    Constructs stand in the regions, and are recomputed with them; or between them, where their
    bodies are recomputed step by step.
    """
    yield from _option(graph, name, regions)
    inside = {v for region in regions for k in region for v in graph.nodes[k].makes}
    sets = policy_sets(program, graph)
    products = {what: values & inside for what, values in sets.items() if what != MARKS}
    for what, values in distinct(products).items():
        if values:
            yield from _option(graph, f"{name}, {what} saved", regions, values)
    bare, chunked = (_named(options, what) for what in (NOTHING_SAVED, IN_CHUNKS))
    if bare:
        places = [k for k, node in enumerate(graph.nodes) if node.position in bare]
        apart = tuple(part for region in regions for part in _apart_from(region, places))
        name = f"{name}, and every {_what(program, bare)}"
        yield from _option(graph, name, apart, constructs=bare)
        if chunked:
            yield from _option(graph, f"{name}, in chunks", apart, constructs=bare | chunked)


def _option(
    graph: CostGraph,
    name: str,
    regions: Regions,
    saved: frozenset[int] = frozenset(),
    constructs: Mapping[int, Option] | None = None,
) -> Iterator[Option]:
    """A `jax.checkpoint` around each region, which saves some values; the rest left to JAX.

    Constructs between the regions run under the option that `constructs` has for their position.
    """
    constructs = constructs or {}
    inside = {k for region in regions for k in region}
    outside = [node for k, node in enumerate(graph.nodes) if k not in inside]
    borders = sorted({k for each in regions for k in (each.start, each.stop)})
    values = _crossing_values(graph, borders) | kept_by_xla(graph, outside) | saved
    offered = {k: [option] for k, option in constructs.items()}
    stages = {k: option.decision for k, option in constructs.items()}
    for option in solve(_once(graph, constructs), offered, saved=values)[:1]:
        # What a region saves is what others read; with names also what it reads itself.
        decision = decision_of_regions(graph, values, stages, regions, by_name=bool(saved))
        again = {p for region in decision.regions for p in region.recomputed}
        if again and not any(node.runs_once and node.position in again for node in graph.nodes):
            cost = sum(each.cost for each in constructs.values())
            cost += recomputed_cost(graph, decision)
            yield dataclasses.replace(option, cost=cost, decision=decision, name=name)


def _inside_constructs(program: Program, graph: CostGraph, options: Options) -> Iterator[Option]:
    """The body of every loop, or every branch, under `jax.checkpoint`; the rest left to JAX."""
    chosen = {k for k, some in options.items() if any(each.name for each in some)}
    if not chosen:
        return
    whole = f"every {_what(program, chosen)} recomputed"
    # What runs once stays outside of regions, where only these options are left.
    graph = _once(graph, chosen)
    names = dict.fromkeys(each.name for k in sorted(chosen) for each in options[k] if each.name)
    bare = _named(options, NOTHING_SAVED)
    for what in names:
        # A construct that has nothing of what is saved is under a bare `jax.checkpoint`.
        named = bare | _named(options, what)
        offered = {
            k: [named.get(k, some[0])] if k in chosen else some for k, some in options.items()
        }
        titles = {NOTHING_SAVED: whole, IN_CHUNKS: f"{whole}, in chunks"}
        name = titles.get(what, f"{whole}, {what} saved")
        for option in solve(graph, offered, saved=kept_by_xla(graph, graph.nodes))[:1]:
            yield _without_regions(graph, dataclasses.replace(option, name=name))


def _without_regions(graph: CostGraph, option: Option) -> Option:
    """The constructs of an option, and no region around them.

    There XLA may fuse what JAX saves into its readers; in a region saved values are written.
    """
    stages = (
        LeftToJax(each.equations) if isinstance(each, Region) else each
        for each in option.stages.stages
    )
    cost = option.cost - recomputed_cost(graph, option.stages)
    return dataclasses.replace(option, cost=cost, decision=Stages(tuple(stages)))


def _named(options: Options, name: str) -> dict[int, Option]:
    """The option of each construct that has this name."""
    return {k: each for k, some in options.items() for each in some if each.name == name}


def _what(program: Program, positions: Iterable[int]) -> str:
    """What a person calls the bodies of these constructs: `step`, `branch`."""
    names = {primitive_name(program.eqns[program.steps[k]]) for k in positions}
    return "branch" if names == {"cond"} else "step"


def _once(graph: CostGraph, positions: Iterable[int]) -> CostGraph:
    """The graph, its nodes at these positions outside of all regions."""
    chosen = set(positions)
    nodes = [
        dataclasses.replace(node, runs_once=node.runs_once or node.position in chosen)
        for node in graph.nodes
    ]
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _crossing_values(graph: CostGraph, borders: Sequence[int]) -> frozenset[int]:
    """The values that are made in front of one of these places and read behind it."""
    last = {v: k for k, node in enumerate(graph.nodes) for v in node.reads}
    found: set[int] = set()
    for k, node in enumerate(graph.nodes):
        i = bisect.bisect(borders, k)
        if i < len(borders):
            found.update(v for v in node.makes if borders[i] <= last.get(v, -1))
    return frozenset(found)


def _apart_from(region: range, nodes: Sequence[int]) -> Iterator[range]:
    """The parts of a region between nodes that are left out of it."""
    start = region.start
    for k in (*(k for k in nodes if k in region), region.stop):
        if start < k:
            yield range(start, k)
        start = k + 1


def _behind_marks(program: Program, graph: CostGraph) -> list[int]:
    """The places behind marked values."""
    marked = marked_values(program, graph)
    return [k + 1 for k, node in enumerate(graph.nodes) if marked.intersection(node.makes)]
