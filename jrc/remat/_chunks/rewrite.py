"""A program in which some regions run in chunks, in loops too.

>>> import jax, jax.numpy as jnp
>>> from jrc._jaxpr import inline_all
>>> loss = lambda w, x: jnp.mean(jax.nn.logsumexp(jnp.tanh(x) @ w, axis=1))
>>> program = Program(inline_all(jax.make_jaxpr(loss)(jnp.ones((4, 500)), jnp.ones((80, 4)))))
>>> (chunked,) = chunks_within(program, narrow=40_000, most_bytes=40_000)
>>> chunked.chunks, chunked.shape
(10, (80, 500))
>>> run = in_chunks(program, [chunked])
>>> bool(jnp.allclose(run(jnp.ones((4, 500)), jnp.ones((80, 4)))[0], 1 + jnp.log(500.0), 2))
True
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jrc._jaxpr import (
    INPUT,
    Dependent,
    Program,
    Slices,
    evaluate,
    independent_axes,
    inline_marked,
    inner_program,
    label,
    nbytes,
    primitive_name,
    shape_of,
    sliced,
    with_inner_program,
)
from jrc._text import Grid, memory_text
from jrc.remat._chunks.regions import Region, chunk_count, wide_regions
from jrc.remat._chunks.run_in_chunks import PlanOne, as_it_is, run_in_chunks
from jrc.remat._gradient.activity import active_variables

Inline = Callable[[Any], Program]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A region of a program that runs in chunks.

    Attributes:
        path: The loops around it, each as the position of its equation.
        equations: The equations of the region, by position.
        cut: The values that enter in slices: the number of the equation from 1 on (0 is the
            program's inputs), which of its results, and the axis.
        chunks: How many chunks.
        shape: The shape of its widest value.
        dtype: Its type.
        name: What makes it, as a label.
        bytes: Its bytes.
        loss: Where the region is the whole loss, and a plan is one of each chunk: which of the
            region's results is differentiated; else `None`.
    """

    path: tuple[int, ...]
    equations: tuple[int, ...]
    cut: tuple[tuple[int, int, int], ...]
    chunks: int
    shape: tuple[int, ...]
    dtype: str
    name: str
    bytes: int
    loss: int | None = None

    @property
    def is_whole_loss(self) -> bool:
        """Whether a plan is one of each chunk."""
        return self.loss is not None


def chunks_from_data(data: dict[str, Any]) -> Chunks:
    """Return a region from plain data, as `dataclasses.asdict` makes it and JSON stores it."""
    return Chunks(
        tuple(data["path"]),
        tuple(data["equations"]),
        tuple((p, i, axis) for p, i, axis in data["cut"]),
        data["chunks"],
        tuple(data["shape"]),
        data["dtype"],
        data["name"],
        data["bytes"],
        data["loss"],
    )


def chunks_table(chunks: Sequence[Chunks]) -> Grid:
    """Return a table of regions in chunks, with the widest value of each."""
    rows = [
        (each.name, memory_text(each.bytes), str(each.chunks), "in a loop" if each.path else "")
        for each in chunks
    ]
    return Grid(("in chunks", "whole", "chunks", ""), rows)


def chunks_within(
    program: Program, narrow: int, most_bytes: int, inline: Inline | None = None
) -> list[Chunks]:
    """Return regions around all values wider than some bytes, in chunks.

    Args:
        program: The program, without `jit` calls.
        narrow: Bytes of the widest value that stays whole.
        most_bytes: Bytes of the widest moment inside of a chunk, about; a region that needs no more
            as a whole stays whole.
        inline: From the body of a loop to its program; by default it is inlined.
    """
    found = [each.chunks(most_bytes) for each in regions_within(program, narrow, inline)]
    return [each for each in found if each is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class RegionInside:
    """A region of a program, or of the body of a loop in it.

    Attributes:
        program: The program that it is of.
        region: The region.
        path: The loops around it, each as the position of its equation.
    """

    program: Program
    region: Region
    path: tuple[int, ...]

    def chunks(self, most_bytes: int) -> Chunks | None:
        """Return the region in chunks of about so many bytes; `None` where it needs no more."""
        count = chunk_count(self.region.parts, self.region.bytes / most_bytes)
        return chunks_of(self.program, self.region, count, self.path) if count > 1 else None


def regions_within(
    program: Program, narrow: int, inline: Inline | None = None, around_loops: bool = True
) -> list[RegionInside]:
    """Return the regions around all values wider than some bytes, those in loops too.

    Args:
        program: The program, without `jit` calls.
        narrow: Bytes of the widest value that stays whole.
        inline: From the body of a loop to its program; by default it is inlined.
        around_loops: Whether a region may hold a loop that has regions inside; such a loop has
            none then.
    """
    return list(_regions_within(program, narrow, inline or _inlined, around_loops, ()))


def _regions_within(
    program: Program, narrow: int, inline: Inline, around_loops: bool, path: tuple[int, ...]
) -> Iterator[RegionInside]:
    loops = {
        p: list(
            _regions_within(inline(inner_program(eqn)), narrow, inline, around_loops, (*path, p))
        )
        for p, eqn in enumerate(program.eqns)
        if primitive_name(eqn) == "scan"
    }
    apart = () if around_loops else [p for p, inside in loops.items() if inside]
    held: set[int] = set()
    for region in wide_regions(program, narrow, apart):
        yield RegionInside(program, region, path)
        held.update(region.equations)
    for p, inside in loops.items():
        if p not in held:
            yield from inside


def chunks_of(program: Program, region: Region, count: int, path: tuple[int, ...]) -> Chunks:
    """Return a region of a program in so many chunks.

    Args:
        program: The program.
        region: The region.
        count: How many chunks; a divisor of its parts.
        path: The loops around the program.
    """
    wide: Any = region.wide
    return Chunks(
        path,
        region.equations,
        tuple((*_place(program, v), axis) for v, axis in region.inputs.items()),
        count,
        shape_of(wide),
        str(wide.aval.dtype),
        label(program.eqns[program.producer[wide]]),
        nbytes(wide.aval),
    )


def in_chunks(
    program: Program,
    choices: Sequence[Chunks],
    inline: Inline | None = None,
    plan_one: PlanOne = as_it_is,
) -> Callable[..., list[Any]]:
    """Return the program as a function of its inputs, with regions in chunks.

    Args:
        program: The program.
        choices: The regions.
        inline: As for `chunks_within`.
        plan_one: From the function of one chunk of the whole loss, and which of its results is
            differentiated, to what runs in its place.

    Raises:
        ValueError: If the program has no such regions.
    """
    return _in_chunks(program, choices, inline or _inlined, program.jaxpr.outvars[:1], plan_one)


def _in_chunks(
    program: Program,
    choices: Sequence[Chunks],
    inline: Inline,
    differentiated: Sequence[Any],
    plan_one: PlanOne = as_it_is,
) -> Callable[..., list[Any]]:
    """Like `in_chunks`; of `differentiated`, results of the program, all derivatives are wanted."""
    here = [each for each in choices if not each.path]
    loops: dict[int, list[Chunks]] = {}
    for each in choices:
        if each.path:
            inner = dataclasses.replace(each, path=each.path[1:])
            loops.setdefault(each.path[0], []).append(inner)
    program = Program(_with_loops(program, loops, inline))
    regions = _with_shared([region_of(program, each) for each in here])
    order = _order(program, here, [slices for slices, _ in regions])
    active = active_variables(program, program.jaxpr.invars, differentiated)

    def run(*inputs: Any) -> list[Any]:
        values: dict[Any, Any] = dict(zip(program.jaxpr.invars, inputs, strict=True))
        values |= dict(zip(program.jaxpr.constvars, program.jaxpr.consts, strict=True))
        for part in order:
            if isinstance(part, int):
                (slices, results), choice = regions[part], here[part]
                made = run_in_chunks(
                    slices, choice.chunks, values, results, False, plan_one, choice.loss, active
                )
                values |= dict(zip(results, made, strict=True))
            else:
                cut = program.cut(part, [v for p in part for v in program.eqns[p].outvars])
                found = evaluate(cut)(*(values[v] for v in cut.invars))
                values |= dict(zip(cut.outvars, found, strict=True))
        return program.results(values)

    return run


def _with_shared(
    regions: Sequence[tuple[Slices, list[Any]]],
) -> list[tuple[Slices, list[Any]]]:
    """The regions, with results that another region reads to make something of them inside."""
    read = {v for each, _ in regions for v in each.read}
    found = []
    for each, results in regions:
        shared = read & each.made.difference(results)
        more = [v for eqn in each.program.eqns for v in eqn.outvars if v in shared]
        found.append((each, [*results, *more]))
    return found


def _with_loops(program: Program, loops: Mapping[int, Sequence[Chunks]], inline: Inline) -> Any:
    """The program in which the bodies of some loops have regions in chunks."""
    eqns = list(program.eqns)
    for p, choices in loops.items():
        if p >= len(eqns) or primitive_name(eqns[p]) != "scan":
            raise ValueError(f"equation {p} is no loop")
        body = inline(inner_program(eqns[p]))
        avals: list[Any] = [v.aval for v in body.jaxpr.invars]
        run = _in_chunks(body, choices, inline, body.jaxpr.outvars)
        new = jax.make_jaxpr(run)(*avals)
        eqns[p] = with_inner_program(eqns[p], new)
    return program.jaxpr.replace(eqns=eqns)


def region_of(program: Program, choice: Chunks) -> tuple[Slices, list[Any]]:
    """Return what of a region runs on slices, and what leaves it.

    Args:
        program: The program.
        choice: The region.

    Raises:
        ValueError: If the program has no such region.
    """
    try:
        cut = {_variable(program, p, i): axis for p, i, axis in choice.cut}
        slices = sliced(program, cut, independent_axes, choice.equations)
    except (IndexError, Dependent) as error:
        raise _another(choice) from error
    inside = set(choice.equations)
    if any(program.producer[v] in inside for v in slices.read):
        raise _another(choice)  # a part of the region is missing
    results = [
        v
        for p in choice.equations
        for v in program.eqns[p].outvars
        if any(c not in inside for c in program.consumers.get(v, ()))
    ]
    is_cut = choice.chunks > 0 and slices.parts % choice.chunks == 0
    if not is_cut or any(v not in slices.made for v in results):
        raise _another(choice)
    return slices, results


def _another(choice: Chunks) -> ValueError:
    return ValueError(
        f"Plan.chunks must be regions of the program that is planned, got the region of "
        f"{choice.name!r}, which cannot run in {choice.chunks} chunks there. Plan again with "
        "jrc.plan."
    )


def _order(
    program: Program, choices: Sequence[Chunks], regions: Sequence[Slices]
) -> list[int | list[int]]:
    """The order of regions, by number, and of runs of equations between them.

    Equations run as late as the region that they are needed for, and after those that they need.
    """
    owner = {p: n for n, each in enumerate(choices) for p in each.equations}
    done: set[Any] = set()
    found: list[int | list[int]] = []

    def emit(p: int) -> None:
        node: Any = ("region", owner[p]) if p in owner else p
        if node in done:
            return
        done.add(node)
        read: Sequence[Any] = program.reads(p)
        if p in owner:
            read = regions[owner[p]].read
        for v in read:
            if program.producer[v] != INPUT:
                emit(program.producer[v])
        if p in owner:
            found.append(owner[p])
        elif found and isinstance(found[-1], list):
            found[-1].append(p)
        else:
            found.append([p])

    for p, is_live in enumerate(program.live()):
        if is_live:
            emit(p)
    return found


def _place(program: Program, v: Any) -> tuple[int, int]:
    p = program.producer[v]
    made = program.jaxpr.invars if p == INPUT else program.eqns[p].outvars
    return p + 1, list(made).index(v)


def _variable(program: Program, p: int, i: int) -> Any:
    return (program.jaxpr.invars if p == 0 else program.eqns[p - 1].outvars)[i]


def _inlined(jaxpr: Any) -> Program:
    return Program(inline_marked(jaxpr, lambda _: True))
