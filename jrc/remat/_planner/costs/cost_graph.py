"""The cost graph: each equation of a program with what it costs, in bytes and time.

The solver sees this graph and nothing else of the program; `build_cost_graph` makes it.
"""

import dataclasses
import functools

from jrc.remat._planner.costs.compilers import WithoutBarrier
from jrc.remat._planner.costs.cost_unit import FLOPS, CostUnit


@dataclasses.dataclass(frozen=True)
class CostNode:
    """One equation. Variables are numbers, indices into the tuples of `CostGraph`.

    Attributes:
        position: Its number in the program.
        makes: Its results.
        reads: Its operands, but for inputs of the program.
        derivative_reads: Those of both that its derivative reads.
        cost: What one run in a region costs, in the graph's unit.
        table_cost: How much of that is for a table that the region holds.
        inner_bytes: Bytes of residuals of programs inside, which have no name outside; 0 if there
            are none, `None` if it may only be part of a region.
        inner_cost: What it costs to save them.
        active: Whether it is differentiated.
        runs_once: Whether it must not be recomputed: it has an effect, or is a collective.
        has_effects: Whether it has an effect, so that no region may hold it.
        held_bytes: Bytes that lie in memory from the start of the program up to its derivative, if
            that is part of a region.
        early_bytes: Bytes that lie in memory from the start of the program up to its derivative in
            any case: what the backward loop of a loop writes into.
        early_again_bytes: The same of its forward loop, if that runs again.
        momentary_bytes: Bytes of cotangents while it is differentiated, or of values without a
            derivative while it runs.
        working_bytes: How many of them are needed inside, by a function whose own derivative is
            computed in a loop; what it saves is among them.
        gradient_bytes: How many of these are gradients, which lie in the memory of results.
        operands: What its derivative reads and XLA would fuse away elsewhere, each with the bytes
            that it then takes.
    """

    position: int
    makes: tuple[int, ...]
    reads: tuple[int, ...] = ()
    derivative_reads: frozenset[int] = frozenset()
    cost: int = 0
    table_cost: int = 0
    inner_bytes: int | None = None
    inner_cost: int = 0
    active: bool = False
    runs_once: bool = False
    has_effects: bool = False
    held_bytes: int = 0
    early_bytes: int = 0
    early_again_bytes: int = 0
    momentary_bytes: int = 0
    working_bytes: int = 0
    gradient_bytes: int = 0
    operands: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def late_reads(self) -> tuple[int, ...]:
        """The operands that its derivative reads."""
        return tuple(v for v in self.reads if v in self.derivative_reads)

    @functools.cached_property
    def late_results(self) -> tuple[int, ...]:
        """The results that its derivative reads."""
        return tuple(v for v in self.makes if v in self.derivative_reads)

    @property
    def forward_cost(self) -> int:
        """What its run in the forward pass costs."""
        return self.cost - self.table_cost

    @property
    def may_stand_outside(self) -> bool:
        """Whether it may stand outside of all regions, as what carries a program may."""
        return self.inner_bytes is not None


@dataclasses.dataclass(frozen=True)
class CostGraph:
    """The live equations of a program in the order in which they run.

    Attributes:
        nodes: The equations.
        sizes: Bytes of every variable.
        recomputed_bytes: Bytes of a variable from its recomputation until its maker has been
            differentiated; 0 if XLA fuses it away, or if only the recomputation reads it.
        passing_bytes: Bytes that it takes for a moment when it is recomputed.
        may_save: Whether a plan may save it.
        names: Where every variable comes from: its equation, and which result it is.
        results: Bytes of the results that are computed last; saved values may lie in their memory.
        saving_costs: What it costs to save a variable that would not be written else; 0 of others.
        fuses_passes: Whether the compiler computes what is elementwise inside of its readers.
        without_barrier: Which saved values stand behind no barrier.
        in_order: Whether stages are differentiated one after the other.
        unit: What costs are counted in.
    """

    nodes: tuple[CostNode, ...]
    sizes: tuple[int, ...]
    recomputed_bytes: tuple[int, ...]
    passing_bytes: tuple[int, ...]
    may_save: tuple[bool, ...]
    names: tuple[tuple[int, int], ...]
    results: tuple[int, ...] = ()
    saving_costs: tuple[int, ...] = ()
    fuses_passes: bool = False
    without_barrier: WithoutBarrier = "none"
    in_order: bool = False
    unit: CostUnit = FLOPS

    def is_fused(self, v: int) -> bool:
        """Return whether XLA computes a variable inside of its readers."""
        return not self.recomputed_bytes[v] and not self.passing_bytes[v]

    @functools.cached_property
    def carries(self) -> frozenset[int]:
        """The variables that are carries of a loop, of whose body the graph is."""
        return frozenset(v for node in self.nodes if node.position < 0 for v in node.makes)

    @functools.cached_property
    def last_readers(self) -> dict[int, int]:
        """The last equation that reads each variable, as an index into the nodes."""
        return {v: k for k, node in enumerate(self.nodes) for v in node.reads}

    @functools.cached_property
    def cost(self) -> int:
        """What one forward pass costs, at least 1."""
        return max(1, sum(node.forward_cost for node in self.nodes))
