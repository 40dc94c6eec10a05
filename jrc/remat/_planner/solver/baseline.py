"""The baseline: what JAX and XLA keep where nothing is recomputed."""

from collections.abc import Mapping, Sequence

from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.costs.memory_model import kept_by_xla
from jrc.remat._planner.solver.option import Option
from jrc.remat._planner.solver.solver import solve


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
    kept = [] if options else solve(graph, saved=kept_by_xla(graph, graph.nodes))
    saved = (residuals + min(kept[-1].peak, residuals)) // 2 if kept else residuals
    passing = (node.momentary_bytes for node in graph.nodes if not node.active)
    inside = (
        saved - min(node.inner_bytes or 0, saved) + node.working_bytes
        for node in graph.nodes
        if node.working_bytes
    )
    return max(saved, *passing, *inside, 0)
