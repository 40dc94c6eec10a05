"""Running a program under a decision: regions are recomputed, named values are saved."""

import functools
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax

from jrc._jaxpr import (
    INPUT,
    Fusion,
    Program,
    evaluate,
    facts_of,
    is_cast,
    is_unrolled,
    is_variable,
    nbytes,
    rebuild,
    with_programs,
)
from jrc._tree import is_floating, is_typed_key
from jrc.remat._planner.execute.run_loop import scan_in_parts, scan_in_segments
from jrc.remat._planner.plan.decision import (
    Body,
    Construct,
    LeftToJax,
    Loop,
    LoopPart,
    Region,
    Stages,
    bodies,
    variable_at,
)
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._policy.checkpoint_names import PINNED_HOST, SAVED, name_value
from jrc.remat._policy.resolution import Policy
from jrc.remat._region.barrier import barrier, gradients_in_order
from jrc.remat._region.region import Region as Recompute
from jrc.remat._region.region import recomputed_region
from jrc.remat._region.rerun_scope import planned_scope
from jrc.remat._segments.cut import Section
from jrc.remat._segments.run_sections import run_section

Run = Callable[..., Sequence[Any]]

# How the result of a product or a reduction, or what follows on it, is saved, in the place of
# `SAVED`.
_OF_KERNEL = "of a kernel"


def execute_decision(program: Program, decision: Stages, in_loop: bool = False) -> Run:
    """Return the program as a function of its inputs whose gradient saves what is decided.

    Args:
        program: The program.
        decision: What is saved.
        in_loop: Whether it is the body of a loop of which XLA compiles one step.
    """
    # The backward pass of a loop is a loop of its own. With one region nothing in it is computed
    # twice that XLA could merge, and a barrier would keep operands from being fused.
    has_barrier = not in_loop or len(decision.regions) > 1
    region = functools.partial(recomputed_region, has_barrier=has_barrier)
    # What a step saves is stacked, and the backward pass reads it from there.
    name = functools.partial(_name, has_barrier=not in_loop)
    equations = [[program.steps[k] for k in stage.equations] for stage in decision.stages]
    before, within = _casts(program, equations)
    offloaded = frozenset(variable_at(program, place) for place in decision.offloaded)
    unplanned = program

    def run(*inputs: Any) -> list[Any]:
        # Traced here, inside of the `shard_map` over whose axes values may vary.
        program = _with_loops_in_regions(unplanned, decision)
        values: dict[Any, Any] = dict(zip(program.jaxpr.invars, inputs, strict=True))
        values |= program.constants
        for n, stage in enumerate(decision.stages):
            _run_plainly(program, before[n], values)
            positions = sorted(equations[n] + within[n])
            if decision.in_order and isinstance(stage, Region | LeftToJax):
                values |= _in_order(program, positions, values)
            match stage:
                case Region():
                    with planned_scope():
                        section = _section(program, decision, stage, positions, offloaded)
                        _run_region(program, section, region, name, values)
                case LeftToJax():
                    _run_plainly(program, positions, values)
                case _:
                    _run_plainly(program, within[n], values)
                    _run_construct(program, stage, values)
        _run_plainly(program, before[-1], values)
        return program.results(values)

    return run


def _with_loops_in_regions(program: Program, decision: Stages) -> Program:
    """The program with the steps of loops that are inside of regions under their decisions."""
    loops = [loop for region in decision.regions for loop in region.inside]
    if not loops:
        return program
    eqns = list(program.eqns)
    for loop in loops:
        p, (body,) = program.steps[loop.equation], bodies(program, loop)
        assert body.decision is not None
        is_compiled_once = _is_compiled_once(eqns[p], loop.parts[0])
        run = execute_decision(body.program, body.decision, is_compiled_once)
        avals: list[Any] = [v.aval for v in body.program.jaxpr.invars]
        eqns[p] = with_programs(eqns[p], {0: jax.make_jaxpr(run)(*avals)})
    return Program(program.jaxpr.replace(eqns=eqns))


def _in_order(program: Program, positions: Sequence[int], values: dict[Any, Any]) -> dict[Any, Any]:
    """What some equations read, so that the gradients of weights come before those of the data.

    Later equations read it too: of a weight that several stages read the sum of gradients is
    computed in order. What is read in parts, as a layer of stacked weights, is left out: the
    gradient of a part would be written as one of the whole.
    """
    read = [v for v in program.cut(positions).invars if is_floating(v.aval)]
    stage = set(positions)
    whole = [v for v in read if not _is_read_in_parts(program, v, stage)]
    if len(whole) < 2 or not any(_is_made(program, v) for v in whole):
        return {}
    return dict(zip(whole, gradients_in_order([values[v] for v in whole]), strict=True))


def _is_read_in_parts(program: Program, var: Any, stage: AbstractSet[int]) -> bool:
    """Whether all equations of a stage that read a value take parts of it: slices, or entries."""
    readers = (program.eqns[p] for p in program.consumers.get(var, ()) if p in stage)
    return all(
        facts_of(eqn).moves_data and all(nbytes(x.aval) < nbytes(var.aval) for x in eqn.outvars)
        for eqn in readers
    )


def _casts(
    program: Program, stages: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """The casts that run before each stage, or the result, and those that run as part of it.

    What one stage alone reads is cast there, so that the cast value need not be saved. What several
    read is cast once: the derivative of a cast is a sum over devices. It is cast in the first of
    them if that makes what is cast.
    """
    made_in = [frozenset(positions) for positions in stages]
    readers: dict[Any, set[int]] = {}
    for n, positions in enumerate([*stages, []]):
        atoms = [v for p in positions for v in program.reads(p)]
        for v in atoms if n < len(stages) else filter(is_variable, program.jaxpr.outvars):
            readers.setdefault(v, set()).add(n)
    before: list[list[int]] = [[] for _ in range(len(stages) + 1)]
    within: list[list[int]] = [[] for _ in stages]
    for p in range(len(program.eqns) - 1, -1, -1):
        eqn = program.eqns[p]
        if not is_cast(eqn) or eqn.outvars[0] not in readers:
            continue
        for v in program.reads(p):
            readers.setdefault(v, set()).update(readers[eqn.outvars[0]])
        (first, *more) = sorted(readers[eqn.outvars[0]])
        makers = {program.producer[program.source(v)] for v in program.reads(p)}
        is_part = first < len(stages) and (not more or not makers.isdisjoint(made_in[first]))
        (within if is_part else before)[first].insert(0, p)
    return before, within


def _run_plainly(program: Program, positions: Sequence[int], values: dict[Any, Any]) -> None:
    part = program.cut(positions, [v for p in positions for v in program.eqns[p].outvars])
    results = evaluate(part)(*(values[v] for v in part.invars))
    values |= dict(zip(part.outvars, results, strict=True))


def _section(
    program: Program,
    decision: Stages,
    region: Region,
    positions: Sequence[int],
    offloaded: Collection[Any],
) -> Section:
    values = [variable_at(program, place) for place in region.saved]
    saved = dict.fromkeys(values if region.by_name else (), SAVED)
    if decision.without_barrier != "none":
        follows = decision.without_barrier == "chains"
        saved |= {v: _OF_KERNEL for v in saved if _is_of_kernel(program, v, follows)}
    # What a region reads is saved with it: on the host if it is named inside.
    read = program.cut(positions).invars
    saved |= {v: PINNED_HOST for v in (*values, *read) if v in offloaded}
    return Section((), True, True, tuple(sorted(positions)), saved)


def _run_construct(program: Program, stage: Construct, values: dict[Any, Any]) -> None:
    p = program.steps[stage.equation]
    results = construct(program, stage)(*(values[v] for v in program.reads(p)))
    values |= dict(zip(program.eqns[p].outvars, results, strict=True))


def _run_region(
    program: Program,
    section: Section,
    region: Recompute,
    name: Callable[[Any, str], Any],
    values: dict[Any, Any],
) -> None:
    """Run a region whose random draws depend on the data that they are combined with.

    Draws depend on keys alone: XLA would start those of all layers early, and keep the results.
    """
    read = program.cut(section.positions).invars
    keys = [v for v in read if is_typed_key(v.aval) or _is_raw_key(v.aval)]
    data = [values[v] for v in read if is_floating(v.aval) and _is_made(program, v)]
    depending = dict(values)
    if keys and data:
        saved = barrier([*(values[v] for v in keys), jax.lax.stop_gradient(data[-1])])
        depending |= dict(zip(keys, saved, strict=False))
    # With `jax_remat3` a result that is saved inside and returned would be saved twice.
    own_inside = not getattr(jax.config, "jax_remat3", False)
    run_section(
        program,
        section,
        Policy(),
        depending,
        region,
        own_inside=own_inside,
        name=name,
    )
    values |= {
        v: depending[v]
        for p in section.positions
        for v in program.eqns[p].outvars
        if v in depending
    }


def _is_made(program: Program, var: Any) -> bool:
    source = program.source(var)
    return is_variable(source) and program.producer[source] != INPUT


def _is_of_kernel(program: Program, var: Any, follows: bool) -> bool:
    """Whether a variable is made by a product or a reduction.

    With `follows`, what is elementwise and alone reads such a result is made there too.
    """
    found = [var]
    for v in found:
        p = program.producer[v]
        facts = None if p == INPUT else facts_of(program.eqns[p])
        if facts is not None and (facts.is_contraction or facts.is_reduction):
            return True
        if follows and facts is not None and facts.fusion is not Fusion.NONE:
            found += [x for x in program.reads(p) if len(program.consumers.get(x, ())) == 1]
    return False


def _name(x: Any, how: str, has_barrier: bool) -> Any:
    """Name a saved value, and return it behind a barrier unless it is saved without one.

    Else XLA recomputes it in its readers, from all that it is the sum of, and keeps those. JAX
    rounds what it saves by `reduce_precision`, which XLA would fuse into the readers likewise. No
    reader computes a product or a reduction again.
    """
    if how == _OF_KERNEL:
        return name_value(x, SAVED)
    named = name_value(x, how)
    return barrier(named) if has_barrier else named


def _is_raw_key(aval: Any) -> bool:
    return str(aval.dtype) == "uint32" and aval.ndim <= 2 and aval.size <= SETTINGS.raw_key_words


def construct(program: Program, stage: Construct | LeftToJax) -> Run:
    """Return a construct as a function of what it reads, the programs inside under a decision."""
    p = program.steps[stage.equations[0]]
    if isinstance(stage, LeftToJax):
        return evaluate(program.cut([p], program.eqns[p].outvars))
    eqn, inner = program.eqns[p], bodies(program, stage)
    if isinstance(stage, Loop):
        return program.run(p, _loop(eqn, stage, inner))
    # In order: two branches may be one program.
    runs = iter(
        [
            evaluate(each.program.jaxpr)
            if each.decision is None
            else execute_decision(each.program, each.decision)
            for each in inner
        ]
    )
    return program.run(p, rebuild(eqn, lambda _: next(runs)))


def _loop(eqn: Any, loop: Loop, inner: Sequence[Body]) -> Run:
    """A `scan` in parts, each with a decision of its own."""
    pairs = list(zip(loop.parts, inner, strict=True))
    runs = [
        execute_decision(body.program, part.body, _is_compiled_once(eqn, part))
        for part, body in pairs
    ]
    loops = [_loop_of(part) for part in loop.parts]
    if len(pairs) == 1:
        return rebuild(eqn, lambda _: runs[0], loops[0])
    current = [runs[0]]

    def select(k: int) -> None:
        current[0] = runs[k]

    parts = [
        (part.steps, functools.partial(select, k), loops[k]) for k, part in enumerate(loop.parts)
    ]
    return rebuild(
        eqn, lambda _: lambda *inputs: current[0](*inputs), functools.partial(scan_in_parts, parts)
    )


def _is_compiled_once(eqn: Any, part: LoopPart) -> bool:
    """Whether XLA compiles one step of a part: a loop, or segments of one, of several steps."""
    if is_unrolled(eqn):
        return False
    # A loop of one step is written in place of the loop.
    segments, steps = part.segments, part.steps
    return 1 not in ((steps // segments, steps % segments) if segments else (steps,))


def _loop_of(part: LoopPart) -> Callable[..., Any]:
    """What runs a part of a `scan`."""
    return functools.partial(scan_in_segments, part.segments) if part.segments else jax.lax.scan
