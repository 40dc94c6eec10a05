"""The baseline: what JAX and XLA keep where nothing is recomputed."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.costs.memory_model import kept_by_xla
from jrc.remat._planner.solver.option import Option
from jrc.remat._planner.solver.option_of_set import all_left_to_jax, option_of_set


def baseline_bytes(
    graph: CostGraph, options: Mapping[int, Sequence[Option]], residuals: int
) -> int:
    """Return the bytes of temporaries of the baseline: halfway between two bounds.

    JAX saves all residuals. XLA may recompute what it can fuse into readers; it does not where it
    writes broadcasts out. In loops and branches it keeps what JAX saves. What has no derivative
    lies in memory for a while, and so does what a function needs that computes its derivative in a
    loop.

    Args:
        graph: The cost graph.
        options: By position, the options of constructs in it.
        residuals: Bytes of all that JAX saves.
    """
    residuals = max(residuals - sum(node.gradient_bytes for node in graph.nodes), 0)
    saved = residuals
    if not options:
        nodes = graph.nodes
        kept = option_of_set(graph, kept_by_xla(graph, nodes), all_left_to_jax(nodes))
        saved = (residuals + min(kept.peak, residuals)) // 2 if kept else residuals
    passing = (node.momentary_bytes for node in graph.nodes if not node.active)
    return max(saved, *passing, *_with_cotangents(graph, saved), 0)


def _with_cotangents(graph: CostGraph, saved: int) -> Iterator[int]:
    """Yield what lies in memory while each equation is differentiated.

    What is saved of later equations is read before; of all that is saved they have the share that
    they have of what derivatives read. Beside it are cotangents, or what a function needs that
    computes its derivative in a loop, but for the gradients that become results.
    """
    late = [
        sum(graph.recomputed_bytes[v] for v in node.makes)
        + (0 if node.working_bytes else node.inner_bytes or 0)
        for node in graph.nodes
    ]
    total = max(sum(late), 1)
    for node, before in zip(graph.nodes, itertools.accumulate(late), strict=True):
        if node.active:
            inside = node.working_bytes - node.gradient_bytes
            beside = inside if node.working_bytes else node.momentary_bytes
            yield int(saved * before / total) + beside
