"""Which values are worth a decision."""

from collections.abc import Mapping, Sequence

from jrc.remat._planner.cost_graph import CostNode

SMALL = 24
"""Up to so many values every one of them may be kept."""


def save_candidates(
    nodes: Sequence[CostNode], sizes: Sequence[int], fused: Sequence[bool]
) -> list[bool]:
    """Which values a plan may keep.

    In a small program all of them. In a large one, of a value and what is made of it by and by
    without any work, the last; and what is smaller than all that it is made of.
    """
    if len(sizes) <= SMALL:
        return [True] * len(sizes)
    readers: dict[int, list[CostNode]] = {}
    for node in nodes:
        for v in node.reads:
            readers.setdefault(v, []).append(node)

    def last(v: int) -> int:
        while len(readers.get(v, ())) == 1:
            (node,) = readers[v]
            light = len(node.makes) == 1 and fused[node.makes[0]] and v not in node.derivative_reads
            if not light or sizes[node.makes[0]] > sizes[v]:
                break
            (v,) = node.makes
        return v

    is_candidate = [False] * len(sizes)
    roots: dict[int, frozenset[int]] = {}
    for node in nodes:
        made_of = frozenset().union(*(roots[v] for v in node.reads))
        for v in node.makes:
            if not fused[v]:
                is_candidate[last(v)] = True
            elif not is_candidate[v] and made_of:
                is_candidate[v] = last(v) == v and sizes[v] <= 0.75 * sum(sizes[r] for r in made_of)
            roots[v] = frozenset({v}) if is_candidate[v] or not fused[v] else made_of
    for node in nodes:
        if node.inner_bytes is not None:
            # Outside of all regions its derivative needs them kept.
            for v in node.reads:
                is_candidate[v] = True
    for v in _past_walls(nodes, readers):
        is_candidate[v] = True
    return is_candidate


def _past_walls(nodes: Sequence[CostNode], readers: Mapping[int, Sequence[CostNode]]) -> set[int]:
    """What is read at or behind a construct that must not be run again, and is made before it.

    No stretch goes across such a construct, so that there is no making these again.
    """
    at = {v: k for k, node in enumerate(nodes) for v in node.makes}
    walls = [
        k
        for k, node in enumerate(nodes)
        if node.has_effects or (node.inner_bytes and node.runs_once)
    ]
    order = {id(node): k for k, node in enumerate(nodes)}
    return {
        v
        for v, reading in readers.items()
        if any(at[v] < k <= max(order[id(node)] for node in reading) for k in walls)
    }
