"""What a cut looks like to a person: segments, what they hold, what they re-run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jrc._jaxpr import Program, Traced, equation_flops, mark_of, nbytes, trace
from jrc.remat._cut import Cut, Cuts, cut_program
from jrc.remat._rerun import rerun_positions
from jrc.remat._table import table

# Equations that a person would not count as work when a segment is re-run.
_UNCOUNTED = frozenset(["broadcast_in_dim"])


@dataclasses.dataclass(frozen=True)
class Segment:
    """One stretch of the program, from after one boundary up to the next.

    Attributes:
        boundary: The marks at its end; empty for what lies after the last boundary.
        recompute: Whether the backward pass runs it again.
        equations: Every value it makes, in program order, by mark name or as
            `primitive:shape@file:line`.
        recomputed: What the rule re-runs: every value that is not held. Marks themselves and mere
            broadcasts do not count.
        rerun: What JAX really re-runs once it has dropped what no gradient needs.
        crossing: Values that later segments use although they are no boundary; they are held too.
        held_bytes: Bytes of all values that leave the segment.
        rerun_flops: Floating-point operations of `rerun`.
    """

    boundary: tuple[str, ...]
    recompute: bool
    equations: tuple[str, ...]
    recomputed: tuple[str, ...]
    rerun: tuple[str, ...]
    crossing: tuple[str, ...]
    held_bytes: int
    rerun_flops: int


@dataclasses.dataclass(frozen=True)
class Segmentation:
    """How a function is cut; prints as a table.

    Attributes:
        segments: The re-run segments in program order, then what lies after the last boundary.
        held: Names of all values kept for the backward pass besides the function's inputs.
        crossing: The held values that are no boundary; moving a boundary there saves bytes.
        unused: Boundaries that cut nothing: the result does not depend on them, or they name an
            input of the function.
    """

    segments: tuple[Segment, ...]
    held: tuple[str, ...]
    crossing: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        """The segments as a table, with unused boundaries and crossing values below."""
        rows = [
            (
                str(i),
                ", ".join(segment.boundary) or "(end)",
                str(len(segment.equations)),
                str(len(segment.recomputed)) if segment.recompute else "-",
                str(len(segment.rerun)) if segment.recompute else "-",
                f"{segment.rerun_flops:,}" if segment.recompute else "-",
                f"{segment.held_bytes:,}",
            )
            for i, segment in enumerate(self.segments)
        ]
        heads = ("", "up to", "equations", "re-run (rule)", "re-run (JAX)", "FLOPs", "bytes held")
        notes = [("crossing", self.crossing), ("unused", self.unused)]
        lines = [f"{word}: {', '.join(names)}" for word, names in notes if names]
        return "\n".join([table(heads, rows), *lines])


def find_segments(
    fn: Callable[..., Any],
    checkpoints: Sequence[str],
    *args: Any,
    rule: str = "partition",
    **kwargs: Any,
) -> Segmentation:
    """Show how `recompute_segments` cuts a function, without running it.

    With `rule="partition"` the boundaries are sorted by producer, and segment i is everything
    after the producer of boundary i-1 up to the producer of boundary i, over the equations that
    the result depends on, in program order.

    Args:
        fn: Any JAX-traceable function of pytrees.
        checkpoints: Names of the boundaries, as given to `jrc.mark`.
        *args: The function's arguments; arrays or `jax.ShapeDtypeStruct`s.
        rule: How boundaries become segments.
        **kwargs: The function's keyword arguments.

    Returns:
        The cut as a frozen value.

    Raises:
        TypeError: If `checkpoints` is a string or holds anything else than strings.
        ValueError: If a boundary is not marked, stands inside a loop or another construct, or
            `rule` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss(w, x):
        ...     a = jrc.mark(x @ w, "a")
        ...     b = jrc.mark(jnp.sin(a) @ w, "b")
        ...     return jnp.sum(b)
        >>> cut = jrc.find_segments(loss, ["b"], jnp.ones((3, 3)), jnp.ones((2, 3)))
        >>> cut.segments[0].boundary, cut.segments[0].recomputed[0], cut.held
        (('b',), 'a', ('b',))

    Source: Paddle `backward.py`, `ProgramStats.get_recompute_segments`.
    """
    who = "jrc.find_segments"
    traced = trace(fn, args, kwargs)
    cuts = cut_program(traced.program, checkpoints, rule, who=who, fn=fn)
    return describe(traced, cuts)


def describe(traced: Traced, cuts: Cuts) -> Segmentation:
    """The cut of a traced function as a value for a person."""
    program = traced.program
    rerun = rerun_positions(traced, cuts)
    segments = tuple(
        _describe(program, cut, again) for cut, again in zip(cuts.cuts, rerun, strict=True)
    )
    held = dict.fromkeys(
        name for cut in cuts.cuts if cut.boundary for name in _left_behind(program, cut).values()
    )
    crossing = tuple(name for segment in segments for name in segment.crossing)
    return Segmentation(segments, tuple(held), crossing, cuts.unused)


def _describe(program: Program, cut: Cut, again: Sequence[int]) -> Segment:
    held = _left_behind(program, cut)
    counted = [p for p in cut.positions if _counts(program, p)]
    return Segment(
        boundary=cut.boundary,
        recompute=cut.recompute,
        equations=tuple(program.name(p) for p in counted),
        recomputed=tuple(
            program.name(p)
            for p in counted
            if cut.recompute and not held.keys() >= set(program.eqns[p].outvars)
        ),
        rerun=tuple(program.name(p) for p in again if _counts(program, p)),
        crossing=tuple(name for name in held.values() if cut.boundary and name not in cut.boundary),
        held_bytes=sum(nbytes(var.aval) for var in held),
        rerun_flops=sum(equation_flops(program.eqns[p]) for p in again),
    )


def _counts(program: Program, p: int) -> bool:
    eqn = program.eqns[p]
    return mark_of(eqn) is None and eqn.primitive.name not in _UNCOUNTED


def _left_behind(program: Program, cut: Cut) -> dict[Any, str]:
    """The values that leave a segment, a marked value once, with their names.

    A value with several marks has the name of the boundary, if one of them is that.
    """
    values = dict.fromkeys(program.unmarked(var) for var in program.crossing(cut.positions))
    made = {var: program.producer[var] for var in values}
    names = {var: program.names.get(var) or program.name(p) for var, p in made.items() if p >= 0}
    for name in cut.boundary:
        for var in program.marked(name):
            names |= {var: name} if var in names else {}
    return names
