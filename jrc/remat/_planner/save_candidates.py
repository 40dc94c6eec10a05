"""Which values are worth a decision."""

from collections.abc import Mapping, Sequence

from jrc.remat._planner.cost_graph import Node

SMALL = 24
"""Up to so many values every one of them may be kept."""


def worth_saving(nodes: Sequence[Node], sizes: Sequence[int], fused: Sequence[bool]) -> list[bool]:
    """Which values a plan may keep.

    In a small program all of them. In a large one, of a value and what is made of it by and by
    without any work, the last; and what is smaller than all that it is made of.
    """
    if len(sizes) <= SMALL:
        return [True] * len(sizes)
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for v in node.reads:
            readers.setdefault(v, []).append(node)

    def last(v: int) -> int:
        while len(readers.get(v, ())) == 1:
            (node,) = readers[v]
            light = len(node.makes) == 1 and fused[node.makes[0]] and v not in node.needs
            if not light or sizes[node.makes[0]] > sizes[v]:
                break
            (v,) = node.makes
        return v

    worth = [False] * len(sizes)
    roots: dict[int, frozenset[int]] = {}
    for node in nodes:
        made_of = frozenset().union(*(roots[v] for v in node.reads))
        for v in node.makes:
            if not fused[v]:
                worth[last(v)] = True
            elif not worth[v] and made_of:
                worth[v] = last(v) == v and sizes[v] <= 0.75 * sum(sizes[r] for r in made_of)
            roots[v] = frozenset({v}) if worth[v] or not fused[v] else made_of
    for node in nodes:
        if node.opaque is not None:
            # Outside of all regions its derivative needs them kept.
            for v in node.reads:
                worth[v] = True
    for v in _past_walls(nodes, readers):
        worth[v] = True
    return worth


def _past_walls(nodes: Sequence[Node], readers: Mapping[int, Sequence[Node]]) -> set[int]:
    """What is read at or behind a construct that must not be run again, and is made before it.

    No stretch goes across such a construct, so that there is no making these again.
    """
    at = {v: k for k, node in enumerate(nodes) for v in node.makes}
    walls = [k for k, node in enumerate(nodes) if node.acts or (node.opaque and node.stays)]
    order = {id(node): k for k, node in enumerate(nodes)}
    return {
        v
        for v, reading in readers.items()
        if any(at[v] < k <= max(order[id(node)] for node in reading) for k in walls)
    }
