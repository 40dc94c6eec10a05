"""A program as a planner sees it: equations with what they cost and what they need."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CostNode:
    """One equation.

    Attributes:
        position: Its position in the program.
        reads: The variables that it is given and that equations make, as numbers.
        makes: The variables that it makes, as numbers.
        needs: Those of both that its derivative reads.
        flops: Floating-point operations of one run.
        opaque: Bytes that its derivative keeps of what happens inside, which have no name; 0 if
            nothing does, `None` if it is not differentiated from the inside.
        moves: Whether it is differentiated.
        stays: Whether it must not be run again: it acts on the world, or sends over the network.
        acts: Whether it acts on the world, so that no region may hold it.
        back: Bytes of cotangents that are there while it is differentiated.
        operands: What its derivative reads and XLA would otherwise fuse away, as numbers, each
            with the bytes that it then takes.
    """

    position: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    derivative_reads: frozenset[int]
    flops: int
    inner_bytes: int | None
    active: bool
    runs_once: bool
    has_effects: bool
    cotangent_bytes: int
    operands: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class CostGraph:
    """A program's live equations in the order in which they are run.

    Attributes:
        nodes: The equations.
        sizes: Bytes of every variable that an equation makes.
        remade: Bytes that it takes when it is made again, until the equation that makes it has
            been differentiated; none if XLA fuses it away, or if only re-running reads it.
        passing: Bytes that it takes for a moment when it is made again.
        may_save: Whether a plan may keep it; what something next to it stands for is left out.
        names: Where every variable comes from: its equation and which result it is.
    """

    nodes: tuple[CostNode, ...]
    sizes: tuple[int, ...]
    remade: tuple[int, ...]
    passing: tuple[int, ...]
    may_save: tuple[bool, ...]
    names: tuple[tuple[int, int], ...]
