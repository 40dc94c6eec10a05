"""Which values a plan may save: the decisions that the solver has to take."""

import dataclasses
from collections.abc import Mapping, Sequence

from jrc.remat._planner.costs.compilers import Compiler
from jrc.remat._planner.costs.cost_graph import CostNode
from jrc.remat._planner.settings import SETTINGS


@dataclasses.dataclass(frozen=True)
class SaveCandidates:
    """Which values a plan may save, and which of them are written anyway.

    Attributes:
        may_save: For each value whether a plan may save it.
        written: The values that kernels write, whether they are saved or not.
    """

    may_save: tuple[bool, ...]
    written: frozenset[int]


def save_candidates(
    nodes: Sequence[CostNode], sizes: Sequence[int], fused: Sequence[bool], compiler: Compiler
) -> SaveCandidates:
    """Return the values that a plan may save.

    In a small program every value may be saved, where the compiler writes what is elementwise. Else
    these: of a value that a kernel makes and the fused values that are computed from it one after
    another, the one that the kernel writes; a value that is smaller than all that it is computed
    from; on accelerators what is written because a kernel reads it; and what a construct outside of
    all regions reads.

    Args:
        nodes: The equations in order.
        sizes: Bytes of every value.
        fused: Whether XLA fuses each value into its readers.
        compiler: The platform's compiler: whether what follows on a kernel is written with it.
    """
    if len(sizes) <= SETTINGS.decide_every_value and not compiler.fuses_passes:
        return SaveCandidates((True,) * len(sizes), frozenset(range(len(sizes))))
    readers: dict[int, list[CostNode]] = {}
    for node in nodes:
        for v in node.reads:
            readers.setdefault(v, []).append(node)

    def last_written(v: int) -> int:
        """The value that a kernel writes, of this one and what follows on it alone."""
        least = v
        while len(readers.get(v, ())) == 1:
            (node,) = readers[v]
            is_light = len(node.makes) == 1 and fused[node.makes[0]]
            if not is_light or v in node.derivative_reads or sizes[node.makes[0]] > sizes[v]:
                break
            (v,) = node.makes
            least = v if sizes[v] < sizes[least] else least
        return v if compiler.continues_products or not compiler.fuses_passes else least

    written_for_kernels = {v for node in nodes for v, size in node.operands if size}
    may_save = [False] * len(sizes)
    sources: dict[int, frozenset[int]] = {}
    for node in nodes:
        made_of = frozenset().union(*(sources[v] for v in node.reads))
        for v in node.makes:
            if not fused[v]:
                may_save[last_written(v)] = True
            elif compiler.fuses_passes and v in written_for_kernels:
                may_save[v] = True
            elif not may_save[v] and made_of:
                share = SETTINGS.smaller_than_sources * sum(sizes[each] for each in made_of)
                may_save[v] = last_written(v) == v and sizes[v] <= share
            sources[v] = frozenset({v}) if may_save[v] or not fused[v] else made_of
    for node in nodes:
        if node.inner_bytes is not None:
            # Outside of all regions its derivative needs them saved.
            for v in node.reads:
                may_save[v] = True
    for v in _read_past_barriers(nodes, readers):
        may_save[v] = True
    by_kernels = {last_written(v) for v, is_fused in enumerate(fused) if not is_fused}
    return SaveCandidates(tuple(may_save), frozenset(by_kernels | written_for_kernels))


def _read_past_barriers(
    nodes: Sequence[CostNode], readers: Mapping[int, Sequence[CostNode]]
) -> set[int]:
    """Return values that are made before, and read at or behind, what no region should contain.

    They cannot be recomputed where they are read, because no region reaches across an effect or a
    construct that runs once. Across a loop one would: all of the loop would be recomputed with it.
    """
    at = {v: k for k, node in enumerate(nodes) for v in node.makes}
    barriers = [k for k, node in enumerate(nodes) if node.has_effects or node.inner_bytes]
    order = {id(node): k for k, node in enumerate(nodes)}
    return {
        v
        for v, reading in readers.items()
        if any(at[v] < k <= max(order[id(node)] for node in reading) for k in barriers)
    }
