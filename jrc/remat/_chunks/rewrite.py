"""A program in which some regions run in chunks, in loops too.

>>> import jax, jax.numpy as jnp
>>> from jrc._jaxpr import inline_all
>>> loss = lambda w, x: jnp.mean(jax.nn.logsumexp(jnp.tanh(x) @ w, axis=1))
>>> program = Program(inline_all(jax.make_jaxpr(loss)(jnp.ones((4, 500)), jnp.ones((80, 4)))))
>>> from jrc.remat._chunks.regions_within import regions_within
>>> (region,) = regions_within(program, narrow=40_000)
>>> run = in_chunks(program, [region.chunks(most_bytes=40_000)])
>>> bool(jnp.allclose(run(jnp.ones((4, 500)), jnp.ones((80, 4)))[0], 1 + jnp.log(500.0), 2))
True
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax

from jrc._jaxpr import (
    INPUT,
    Dependent,
    Program,
    Slices,
    Split,
    evaluate,
    independent_axes,
    inlined_program,
    is_variable,
    primitive_name,
    replaceable_programs,
    same_values,
    shape_of,
    sliced,
    with_mapped_program,
    with_programs,
    without_mesh_axes,
)
from jrc.remat._chunks.chunks import Chunks, Place, SplitAxis
from jrc.remat._chunks.form import program_in_form
from jrc.remat._chunks.in_shards import PartsOf, ShardedRegion, region_alone
from jrc.remat._chunks.numbering import with_casts
from jrc.remat._chunks.run_in_chunks import PlanOne, as_it_is, run_in_chunks
from jrc.remat._gradient.activity import (
    active_variables,
    differentiated_outside,
    differentiated_results,
)


def in_chunks(
    program: Program,
    choices: Sequence[Chunks],
    plan_one: PlanOne = as_it_is,
) -> Callable[..., list[Any]]:
    """Return the program as a function of its inputs, with regions in chunks.

    Args:
        program: The program; regions are those of a form of it.
        choices: The regions.
        plan_one: From the function of one chunk of the whole loss, and which of its results is
            differentiated, to what runs in its place.

    Raises:
        ValueError: If the program has no such regions.
    """
    if not choices:
        return evaluate(program.jaxpr)
    return _in_chunks(program, choices, [0], plan_one)


def _in_chunks(
    program: Program,
    choices: Sequence[Chunks],
    which: Iterable[int],
    plan_one: PlanOne = as_it_is,
) -> Callable[..., list[Any]]:
    """Like `in_chunks`; of the results at `which` all derivatives are wanted."""
    program = _in_form(program, choices[0])
    differentiated = [program.jaxpr.outvars[i] for i in which]
    here = [each for each in choices if not each.path]
    inside: dict[int, list[Chunks]] = {}
    for each in choices:
        if each.path:
            inside.setdefault(each.path[0], []).append(each.inside())
    program = Program(_with_programs_inside(program, inside, differentiated))
    here = [_with_casts(program, each) for each in here]
    part = without_mesh_axes(program, {name for x in here for y in x.shards for name in y.names})
    original = same_values(part, program)
    regions = _with_shared(here, [region_of(part, each) for each in here])
    order = _order(part, here, [slices for slices, _ in regions])
    wanted = set(filter(is_variable, differentiated))
    ends = [v for v, w in original.items() if w in wanted]
    runs = [
        _region_run(
            part,
            choice,
            slices,
            results,
            plan_one,
            differentiated_outside(part, choice.equations, ends),
        )
        for choice, (slices, results) in zip(here, regions, strict=True)
    ]

    def run(*inputs: Any) -> list[Any]:
        values: dict[Any, Any] = dict(zip(program.jaxpr.invars, inputs, strict=True))
        values |= program.constants
        for step in order:
            if isinstance(step, int):
                made = runs[step]({v: values[w] for v, w in original.items() if w in values})
                named = [original[v] for v in regions[step][1]]
                values |= dict(zip(named, made, strict=True))
            else:
                cut = program.cut(step, [v for p in step for v in program.eqns[p].outvars])
                found = evaluate(cut)(*(values[v] for v in cut.invars))
                values |= dict(zip(cut.outvars, found, strict=True))
        return program.results(values)

    return run


def _region_run(
    program: Program,
    choice: Chunks,
    slices: Slices,
    results: Sequence[Any],
    plan_one: PlanOne,
    differentiated: Set[Any],
) -> Callable[[Mapping[Any, Any]], list[Any]]:
    """From the values of a program to the results of one of its regions."""

    def in_chunks(
        slices: Slices, values: Mapping[Any, Any], made: Sequence[Any], which: Sequence[int]
    ) -> list[Any]:
        wanted = {v for v, i in zip(made, which, strict=True) if results[i] in differentiated}
        loss = None if choice.loss is None else list(which).index(choice.loss)
        return run_in_chunks(
            slices,
            choice.chunks,
            values,
            made,
            recompute=False,
            plan_one=plan_one,
            loss=loss,
            differentiated=wanted,
            are_in_turn=choice.are_in_turn,
        )

    if not choice.shards:
        return lambda values: in_chunks(slices, values, results, range(len(results)))
    alone, region = _sharded(program, choice, slices, results)
    return lambda values: region.run([values[v] for v in alone.jaxpr.invars], in_chunks)


def _sharded(
    program: Program, choice: Chunks, slices: Slices, results: Sequence[Any]
) -> tuple[Program, ShardedRegion]:
    """A region as a program of its own, and how its parts run."""
    alone, axes = region_alone(slices, results)
    position = {v: i for i, v in enumerate(alone.jaxpr.invars)}
    parts = [
        PartsOf(
            _positions(program, each.cut, position),
            each.parts,
            each.names,
            _splits(program, each.split, position),
        )
        for each in choice.shards
    ]
    try:
        return alone, ShardedRegion(alone, axes, parts)
    except (Dependent, ValueError) as error:
        raise _another(choice) from error


class OneChunk(NamedTuple):
    """What of a region one chunk is.

    Attributes:
        slices: What runs on slices, in one of the region's parts.
        results: Its results.
        positions: Their positions among the results of the region.
        active: The values that are differentiated, among those that it reads.
    """

    slices: Slices
    results: list[Any]
    positions: list[int]
    active: set[Any]


def one_chunk_of(program: Program, choice: Chunks, inputs: Iterable[Any]) -> OneChunk:
    """Return what one chunk of a region computes.

    Args:
        program: The program.
        choice: The region.
        inputs: The inputs of the program that it is differentiated by.
    """
    program = _in_form(program, choice)
    part = without_mesh_axes(program, {name for each in choice.shards for name in each.names})
    choice = _with_casts(part, choice)
    slices, results = region_of(part, choice)
    found = active_variables(program, inputs, program.jaxpr.outvars[:1])
    active = {v for v, w in same_values(part, program).items() if w in found}
    if not choice.shards:
        return OneChunk(slices, results, list(range(len(results))), active)
    _, region = _sharded(part, choice, slices, results)
    return OneChunk(region.slices, *region.innermost(active))


def _positions(
    program: Program, places: Sequence[Place], position: Mapping[Any, int]
) -> dict[int, int]:
    """The axis of each input of a region, by the input's position."""
    values = [(_variable(program, p, i), axis) for p, i, axis in places]
    return {position[v]: axis for v, axis in values if v in position}


def _splits(
    program: Program,
    split: Sequence[SplitAxis],
    position: Mapping[Any, int],
) -> dict[int, Split]:
    """How inputs of a region that are no data are split, by the input's position."""
    found: dict[int, list[tuple[str, ...]]] = {}
    for each in split:
        p, i, axis = each.place
        v = _variable(program, p, i)
        if v in position:
            whole: list[tuple[str, ...]] = [() for _ in shape_of(v)]
            found.setdefault(position[v], whole)[axis] = each.names
    return {i: tuple(names) for i, names in found.items()}


def _with_shared(
    choices: Sequence[Chunks], regions: Sequence[tuple[Slices, list[Any]]]
) -> list[tuple[Slices, list[Any]]]:
    """The regions, with results that another region reads to make something of them inside."""
    read = {v for each, _ in regions for v in each.read}
    found = []
    for choice, (each, results) in zip(choices, regions, strict=True):
        made = [v for p in choice.equations for v in each.program.eqns[p].outvars]
        more = [v for v in made if v in read and v in each.made and v not in results]
        found.append((each, [*results, *more]))
    return found


def _with_programs_inside(
    program: Program, choices: Mapping[int, Sequence[Chunks]], ends: Sequence[Any]
) -> Any:
    """The program in which bodies of loops, and parts of a `shard_map`, have regions in chunks.

    Args:
        program: The program.
        choices: The regions inside of each such equation, by its number.
        ends: The results of the program that are differentiated.
    """
    eqns = list(program.eqns)
    for k, inside in choices.items():
        p = program.steps[k] if k < len(program.steps) else len(eqns)
        kind = primitive_name(eqns[p]) if p < len(eqns) else ""
        if kind == "shard_map":
            which = differentiated_results(program, p, ends)
            eqns[p] = with_mapped_program(
                eqns[p], functools.partial(_inside_in_chunks, choices=inside, which=which)
            )
        elif p < len(eqns) and replaceable_programs(eqns[p]):
            eqns[p] = _with_regions_inside(eqns[p], inside)
        else:
            raise ValueError(f"equation {k} has no program inside")
    return program.jaxpr.replace(eqns=eqns)


def _with_regions_inside(eqn: Any, choices: Sequence[Chunks]) -> Any:
    """A loop, a conditional or a `jax.checkpoint` region with regions in chunks inside."""
    programs, of_program = replaceable_programs(eqn), {0: list(choices)}
    if primitive_name(eqn) == "cond":
        of_program = {}
        for each in choices:
            of_program.setdefault(each.path[0], []).append(each.inside())
    new = {}
    for i, some in of_program.items():
        run = _inside_in_chunks(programs[i], some, range(len(programs[i].outvars)))
        new[i] = jax.make_jaxpr(run)(*(v.aval for v in programs[i].invars))
    return with_programs(eqn, new)


def _inside_in_chunks(
    jaxpr: Any, choices: Sequence[Chunks], which: Iterable[int]
) -> Callable[..., list[Any]]:
    """A program inside of an equation; of its results those at `which` are differentiated."""
    return _in_chunks(inlined_program(jaxpr), choices, which)


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
    is_cut = 0 < choice.chunks <= slices.parts
    if not is_cut or any(v not in slices.made for v in results):
        raise _another(choice)
    return slices, results


def _in_form(program: Program, choice: Chunks) -> Program:
    try:
        return program_in_form(program, choice.form)
    except IndexError as error:
        raise _another(choice) from error


def _with_casts(program: Program, choice: Chunks) -> Chunks:
    try:
        return with_casts(program, choice)
    except IndexError as error:
        raise _another(choice) from error


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


def _variable(program: Program, p: int, i: int) -> Any:
    return (program.given if p == 0 else program.eqns[p - 1].outvars)[i]
