"""`jrc.find_segments`: how a function is cut, what is saved and what is recomputed."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrc._errors import public
from jrc._jaxpr import Program, Traced, equation_flops, nbytes, trace
from jrc._text import Grid, html_of, text_of
from jrc.remat._policy.rules import Rule
from jrc.remat._region.effects import must_run_once
from jrc.remat._segments.boundaries import counts_as_work
from jrc.remat._segments.cut import Section, SectionedProgram, cut_program
from jrc.remat._segments.cut_notices import crossing_values, saved_values
from jrc.remat._segments.request import checked_request
from jrc.remat._segments.rerun_equations import rerun_positions


@dataclasses.dataclass(frozen=True)
class Segment:
    """A segment of a program.

    Attributes:
        boundary: The marks of the boundaries that it makes.
        recompute: Whether the backward pass recomputes it.
        equations: Every value it makes, in program order, by mark name or as
            `primitive:shape@file:line`.
        recomputed: What the rule recomputes: every value that is not saved. Marks and mere
            broadcasts do not count.
        rerun: What JAX recomputes, once it has dropped what no gradient needs.
        crossing: Values that are no boundary and that others read; they are saved too.
        held_bytes: Bytes of all values that the segment saves or others read.
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
    """How a function is cut; it prints as a table.

    Attributes:
        segments: The segments in program order.
        rest: All equations in no segment, which run once, as one `Segment`.
        held: Names of all values that are saved at the ends of segments and inside them, besides
            the function's inputs.
        crossing: Saved values that cross from one segment into another and are no boundary.
            Better boundaries would reduce them.
        unused: Boundaries that cut nothing: the result does not depend on them, or they name an
            input of the function; with Paddle's rules also names that no mark carries.
        too_short: Pairs of adjacent boundaries with a single equation or none between them,
            which Paddle's rules do not recompute.
    """

    segments: tuple[Segment, ...]
    rest: Segment
    held: tuple[str, ...]
    crossing: tuple[str, ...]
    unused: tuple[str, ...]
    too_short: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return the segments as a table, and below it what did not become one."""
        return text_of(self._parts())

    def _repr_html_(self) -> str:
        """Return the segmentation for a notebook."""
        return html_of(self._parts())

    def _parts(self) -> list[str | Grid]:
        rows = [
            (
                str(i),
                ", ".join(segment.boundary),
                str(len(segment.equations)),
                str(len(segment.recomputed)) if segment.recompute else "-",
                str(len(segment.rerun)) if segment.recompute else "-",
                f"{segment.rerun_flops:,}" if segment.recompute else "-",
                f"{segment.held_bytes:,}",
            )
            for i, segment in enumerate(self.segments)
        ]
        rows.append(("", "(in no segment)", str(len(self.rest.equations)), "-", "-", "-", "-"))
        heads = ("", "up to", "equations", "re-run (rule)", "re-run (JAX)", "FLOPs", "bytes held")
        notes = [
            ("crossing", self.crossing),
            ("unused", self.unused),
            ("too short to re-run", [" to ".join(pair) for pair in self.too_short]),
        ]
        lines = [f"{word}: {', '.join(names)}" for word, names in notes if names]
        return [Grid(heads, rows), *lines]


@public("jrc.find_segments")
def find_segments(
    fn: Callable[..., Any],
    checkpoints: Sequence[str],
    *args: Any,
    rule: str = "partition",
    keep: Rule | None = None,
    keep_patterns: Sequence[Mapping[str, Any]] = (),
    no_recompute_segments: Sequence[int] = (),
    recompute_collectives: bool = False,
    **kwargs: Any,
) -> Segmentation:
    """Show how `recompute_segments` cuts a function, without running it.

    All rules go over the equations that the result depends on, in program order; marks and mere
    broadcasts do not count.

    - `"partition"`: boundaries sorted by producer; segment i is everything after the producer of
      boundary i-1 up to the producer of boundary i.
    - `"fluid"` (Paddle's `RecomputeOptimizer`): from the first consumer of each boundary to the
      producer of the next, if that is more than one equation; a prefix from the start if the
      first such segment begins later. One boundary alone: from the start to its producer.
      Unknown names are dropped, and random keys are saved.
    - `"pass"` (Paddle's `RecomputePass`): the same, but the first boundary always gets the
      segment from the start to its producer, and there is no other prefix.

    Args:
        fn: Any JAX-traceable function of pytrees.
        checkpoints: Names of the boundaries, as given to `jrc.mark`.
        *args: The function's arguments; arrays or `jax.ShapeDtypeStruct`s.
        rule: How boundaries become segments.
        keep: As for `jrc.recompute_segments`, like the next three.
        keep_patterns: Runs of operators whose results are saved.
        no_recompute_segments: Numbers of segments that are not recomputed.
        recompute_collectives: Whether collectives are recomputed.
        **kwargs: The function's keyword arguments.

    Returns:
        The cut as a frozen value.

    Raises:
        TypeError: If `fn` is no function, or `checkpoints` is a string or contains anything else
            than strings.
        ValueError: If a boundary is not marked, stands inside a loop or another construct, or
            `rule` is unknown. Paddle's rules report a name that no mark carries in `.unused`.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss(w, x):
        ...     a = jrc.mark(x @ w, "a")
        ...     b = jrc.mark(jnp.sin(a) @ w, "b")
        ...     return jnp.sum(b)
        >>> cut = jrc.find_segments(loss, ["b"], jnp.ones((3, 3)), jnp.ones((2, 3)))
        >>> cut.segments[0].boundary, cut.segments[0].recomputed[0], cut.held
        (('b',), 'a', ('b',))

    Source: Paddle `backward.py`, `ProgramStats.get_recompute_segments`, and
    `auto_parallel_recompute.py`, `RecomputeState.get_recompute_segments`.
    """
    request = checked_request(
        fn, checkpoints, rule, keep, keep_patterns, no_recompute_segments,
        recompute_collectives,
    )  # fmt: skip
    traced = trace(fn, args, kwargs, request.opens)
    sections = cut_program(traced.program, request, fn)
    return segmentation_of(traced, sections)


def segmentation_of(traced: Traced, sections: SectionedProgram) -> Segmentation:
    """Return how a traced function is cut, for a user."""
    program = traced.program
    pairs = list(zip(sections.sections, rerun_positions(traced, sections), strict=True))
    segments = tuple(_describe(program, part, rerun) for part, rerun in pairs if part.is_segment)
    outside = sorted(p for part, _ in pairs if not part.is_segment for p in part.positions)
    rest = _describe(program, Section((), False, False, tuple(outside), {}), ())
    held = dict.fromkeys(
        name
        for part, _ in pairs
        if part.is_segment
        for name in saved_values(program, part).values()
    )
    crossing = tuple(name for segment in segments for name in segment.crossing)
    return Segmentation(segments, rest, tuple(held), crossing, sections.unused, sections.too_short)


def _describe(program: Program, section: Section, rerun: Sequence[int]) -> Segment:
    saved = saved_values(program, section)
    counted = [p for p in section.positions if counts_as_work(program, p)]
    crossing = crossing_values(program, section) if section.is_segment else {}
    return Segment(
        boundary=section.boundary,
        recompute=section.recompute,
        equations=tuple(program.name(p) for p in counted),
        recomputed=tuple(
            program.name(p)
            for p in counted
            if section.recompute and _is_recomputed(program.eqns[p], saved)
        ),
        rerun=tuple(program.name(p) for p in rerun if counts_as_work(program, p)),
        crossing=tuple(crossing.values()),
        held_bytes=sum(nbytes(var.aval) for var in saved),
        rerun_flops=sum(equation_flops(program.eqns[p]) for p in rerun),
    )


def _is_recomputed(eqn: Any, saved: Mapping[Any, str]) -> bool:
    return not saved.keys() >= set(eqn.outvars) and not must_run_once(eqn)
