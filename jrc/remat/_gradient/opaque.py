"""What stays opaque: equations whose derivative saves values that no plan and no mark can name.

They are functions with a derivative of their own, `while` loops, and `jax.checkpoint` regions that
stay. What the derivative of one saves besides its operands is counted by asking JAX.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from jrc._jaxpr import (
    UNKNOWN,
    Program,
    call_name,
    can_rebuild,
    evaluate,
    facts_of,
    in_shard_map,
    inlined_program,
    inner_programs,
    is_variable,
    loop_parts,
    place,
    primitive_name,
    repeats,
)
from jrc._text import memory_text
from jrc._tree import is_floating
from jrc.remat._gradient.activity import active_variables
from jrc.remat._gradient.custom_rules import is_custom_product
from jrc.remat._gradient.residuals import residuals_of

Path = tuple[tuple[int, int], ...]
"""Where an equation is: from outside in, its number among the steps, and which program inside."""


_MOST_LINES = 6


@dataclasses.dataclass(frozen=True)
class Opaque:
    """Equal equations of one source line that stay opaque.

    Attributes:
        name: The primitive, and the function that it calls: `custom_vjp_call of attention`.
        place: The source line, `net.py:31`.
        times: How many of them run, steps of loops included.
        bytes: What they save besides their operands, all of them together.
        recomputed: Whether a plan recomputes them, so that nothing of it is saved.
    """

    name: str
    place: str
    times: int
    bytes: int
    recomputed: bool = False

    def __str__(self) -> str:
        """One line: what, where, and its bytes."""
        times = f"{self.times:,} x " if self.times > 1 else ""
        fate = "recomputed" if self.recomputed else "saved"
        where = "" if self.place == UNKNOWN else f" at {self.place}"
        return f"{times}{self.name}{where}, {memory_text(self.bytes)} {fate}"


def opaque_equations(
    program: Program,
    perturbed: Iterable[Any],
    wanted: Iterable[Any],
    regions: bool,
) -> tuple[tuple[Path, Opaque], ...]:
    """Return the differentiated equations that are opaque, at any depth, in program order.

    Args:
        program: The program.
        perturbed: The inputs that it is differentiated by.
        wanted: The results that are differentiated.
        regions: Whether `jax.checkpoint` regions count.
    """
    walker = _Walker(regions)
    return tuple(walker.found(program, perturbed, wanted, (), 1))


def gathered(found: Iterable[Opaque]) -> tuple[Opaque, ...]:
    """Return equal ones of one source line as one, those of most bytes first."""
    groups: dict[Any, tuple[int, int]] = {}
    for each in found:
        key = each.name, each.place, each.recomputed
        times, size = groups.get(key, (0, 0))
        groups[key] = times + each.times, size + each.bytes
    together = [
        Opaque(name, line, times, size, recomputed)
        for (name, line, recomputed), (times, size) in groups.items()
    ]
    return tuple(sorted(together, key=lambda each: (-each.bytes, each.place, each.name)))


def opaque_lines(found: Sequence[Opaque]) -> list[str]:
    """Return a line for each of the largest, and one for the others."""
    lines = [f"opaque: {each}" for each in found[:_MOST_LINES]]
    if rest := found[_MOST_LINES:]:
        size = memory_text(sum(each.bytes for each in rest))
        lines.append(f"opaque: {sum(each.times for each in rest):,} more, {size}")
    return lines


@dataclasses.dataclass(frozen=True)
class _Walker:
    regions: bool

    def found(
        self,
        program: Program,
        perturbed: Iterable[Any],
        wanted: Iterable[Any],
        path: Path,
        times: int,
    ) -> Iterator[tuple[Path, Opaque]]:
        active = active_variables(program, perturbed, wanted)
        for k, p in enumerate(program.steps):
            eqn = program.eqns[p]
            if active.isdisjoint(eqn.outvars) or not repeats(eqn):
                continue
            if can_rebuild(eqn):
                yield from self._inside(eqn, active, path, k, times)
            elif self._is_opaque(eqn):
                yield (*path, (k, 0)), _opaque(program, p, active, times)

    def _is_opaque(self, eqn: Any) -> bool:
        facts = facts_of(eqn)
        hides = facts.hides_residuals or is_custom_product(eqn)
        return hides and (self.regions or not facts.is_region)

    def _inside(
        self, eqn: Any, active: Collection[Any], path: Path, k: int, times: int
    ) -> Iterator[tuple[Path, Opaque]]:
        atoms = eqn.invars[1:] if primitive_name(eqn) == "cond" else eqn.invars
        flags = [is_variable(x) and x in active for x in atoms]
        if primitive_name(eqn) == "scan":
            start, count = loop_parts(eqn)
            # A carry that is not differentiated in the first step may be in the next one.
            flags[start : start + count] = [any(flags)] * count
        collected: list[tuple[Path, Opaque]] = []

        def visit(b: int, jaxpr: Any) -> None:
            body = inlined_program(jaxpr)
            pairs = zip(body.jaxpr.invars, flags, strict=True)
            perturbed = [v for v, flag in pairs if flag and is_floating(v.aval)]
            here = (*path, (k, b))
            collected.extend(
                self.found(body, perturbed, body.jaxpr.outvars, here, times * repeats(eqn))
            )

        if primitive_name(eqn) == "shard_map":
            in_shard_map(eqn, lambda jaxpr: visit(0, jaxpr))
        else:
            for b, jaxpr in enumerate(inner_programs(eqn)):
                visit(b, jaxpr)
        yield from collected


def _opaque(program: Program, p: int, active: Collection[Any], times: int) -> Opaque:
    eqn, given = program.eqns[p], program.reads(p)
    perturbed = [i for i, v in enumerate(given) if v in active]
    run = evaluate(program.cut([p], eqn.outvars))
    size = residuals_of(run, [v.aval for v in given], perturbed).bytes
    function = call_name(eqn)
    name = primitive_name(eqn) + (f" of {function}" if function else "")
    if function == "loss_in_chunks":  # what chunks of this package compute beside their values
        name = "gradients beside a sum in chunks"
    return Opaque(name, place(eqn), times, size * times)
