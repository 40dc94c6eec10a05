"""Running a program under a decision: regions are recomputed, named values are saved."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from jrc._jaxpr import (
    INPUT,
    Program,
    evaluate,
    is_cast,
    is_variable,
    primitive_name,
    rebuild,
    repeats,
)
from jrc._tree import is_floating, is_typed_key
from jrc.remat._planner.execute.run_loop import scan_in_chunks, scan_in_parts
from jrc.remat._planner.plan.decision import Decision, Place, Stage
from jrc.remat._planner.program.trace import inlined_program
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._policy.checkpoint_names import PINNED_HOST, SAVED, name_value
from jrc.remat._policy.resolution import Policy
from jrc.remat._region.barrier import barrier
from jrc.remat._region.region import Region, recomputed_region
from jrc.remat._region.rerun_scope import planned_scope
from jrc.remat._segments.cut import Section
from jrc.remat._segments.run_sections import run_section

Run = Callable[..., Sequence[Any]]


def execute_decision(program: Program, decision: Decision, in_loop: bool = False) -> Run:
    """Return the program as a function of its inputs whose gradient saves what is decided.

    Args:
        program: The program.
        decision: What is saved.
        in_loop: Whether it is the body of a loop of which XLA compiles one step.
    """
    # The backward pass of a loop is a loop of its own. With one region nothing in it is computed
    # twice that XLA could merge, and a barrier would keep operands from being fused.
    regions = sum(stage.region for stage in decision.stages)
    region = functools.partial(recomputed_region, has_barrier=not in_loop or regions > 1)
    # What a step saves is stacked, and the backward pass reads it from there.
    name = name_value if in_loop else _name_in_front_of_barrier
    stages = [[program.steps[k] for k in stage.positions] for stage in decision.stages]
    before, within = _casts(program, stages)
    offloaded = frozenset(variable_at(program, place) for place in decision.offloaded)

    def run(*inputs: Any) -> list[Any]:
        values: dict[Any, Any] = dict(zip(program.jaxpr.invars, inputs, strict=True))
        values |= dict(zip(program.jaxpr.constvars, program.jaxpr.consts, strict=True))
        for n, stage in enumerate(decision.stages):
            _run_plainly(program, before[n], values)
            if stage.region:
                with planned_scope():
                    section = _section(program, stage, stages[n] + within[n], offloaded)
                    _run_region(program, section, region, name, values)
            elif stage.inside is None:
                _run_plainly(program, sorted(stages[n] + within[n]), values)
            else:
                _run_plainly(program, within[n], values)
                _run_construct(program, stages[n][0], stage.inside, values)
        _run_plainly(program, before[-1], values)
        return program.results(values)

    return run


def _casts(
    program: Program, stages: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """The casts that run before each stage, or the result, and those that run as part of it.

    What one stage alone reads is cast there, so that the cast value need not be saved. What several
    read is cast once: the derivative of a cast is a sum over devices.
    """
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
        alone = not more and first < len(stages)
        (within if alone else before)[first].insert(0, p)
    return before, within


def _run_plainly(program: Program, positions: Sequence[int], values: dict[Any, Any]) -> None:
    part = program.cut(positions, [v for p in positions for v in program.eqns[p].outvars])
    results = evaluate(part)(*(values[v] for v in part.invars))
    values |= dict(zip(part.outvars, results, strict=True))


def variable_at(program: Program, place: Place) -> Any:
    """Return the variable that a decision calls by its equation and number."""
    k, i = place
    return (program.jaxpr.invars if k == INPUT else program.eqns[program.steps[k]].outvars)[i]


def _section(
    program: Program, stage: Stage, positions: Sequence[int], offloaded: Collection[Any]
) -> Section:
    values = [variable_at(program, place) for place in stage.saved]
    saved = dict.fromkeys(values if stage.by_name else (), SAVED)
    # What a region reads is saved with it: on the host if it is named inside.
    read = program.cut(positions).invars
    saved |= {v: PINNED_HOST for v in (*values, *read) if v in offloaded}
    return Section((), True, True, tuple(sorted(positions)), saved)


def _run_construct(
    program: Program, p: int, inside: Decision | None, values: dict[Any, Any]
) -> None:
    results = construct(program, p, inside)(*(values[v] for v in program.reads(p)))
    values |= dict(zip(program.eqns[p].outvars, results, strict=True))


def _run_region(
    program: Program,
    section: Section,
    region: Region,
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


def _name_in_front_of_barrier(x: Any, how: str) -> Any:
    """Name a saved value, and return it behind a barrier.

    Else XLA recomputes it in its readers, from all that it is the sum of, and keeps those. JAX
    rounds what it saves by `reduce_precision`, which XLA would fuse into the readers likewise.
    """
    return barrier(name_value(x, how))


def _is_raw_key(aval: Any) -> bool:
    return str(aval.dtype) == "uint32" and aval.ndim <= 2 and aval.size <= SETTINGS.raw_key_words


def construct(program: Program, p: int, inside: Decision | None) -> Run:
    """Return a construct as a function of what it reads, its program run under a decision."""
    eqn = program.eqns[p]
    if inside is None:
        return evaluate(program.cut([p], eqn.outvars))
    if inside.branches:
        return program.run(p, rebuild(eqn, _branches(eqn, inside)))
    if inside.parts:
        return program.run(p, _loop_in_parts(eqn, inside))
    in_loop = _is_compiled_once(eqn, repeats(eqn), inside.chunks)
    body = lambda jaxpr: execute_decision(inlined_program(jaxpr), inside, in_loop)  # noqa: E731
    return program.run(p, rebuild(eqn, body, _loop(inside)))


def _is_compiled_once(eqn: Any, steps: int, chunks: int) -> bool:
    """Whether XLA compiles one step of a construct: a loop, or chunks of one, of several steps."""
    if primitive_name(eqn) != "scan" or eqn.params["unroll"] != 1:
        return False
    # A loop of one step is written in place of the loop.
    return 1 not in ((steps // chunks, steps % chunks) if chunks else (steps,))


def _loop(inside: Decision) -> Callable[..., Any]:
    """What runs a `scan`, all of it or a part, under a decision for its body."""
    if inside.chunks:
        return functools.partial(scan_in_chunks, inside.chunks)
    return jax.lax.scan


def _loop_in_parts(eqn: Any, inside: Decision) -> Run:
    """A `scan` in parts, each with a decision of its own."""
    program = inlined_program(eqn.params["jaxpr"])
    bodies = [
        execute_decision(program, each, _is_compiled_once(eqn, steps, each.chunks))
        for steps, each in inside.parts
    ]
    current = [bodies[0]]

    def select(k: int) -> None:
        current[0] = bodies[k]

    parts = [
        (steps, functools.partial(select, k), _loop(each))
        for k, (steps, each) in enumerate(inside.parts)
    ]
    return rebuild(
        eqn, lambda _: lambda *inputs: current[0](*inputs), functools.partial(scan_in_parts, parts)
    )


def _branches(eqn: Any, inside: Decision) -> Callable[[Any], Run]:
    """From a branch of a `cond` to the function that runs it under its decision."""
    pairs = zip(eqn.params["branches"], inside.branches, strict=True)
    # In order: two branches may be one program.
    runs = iter(
        [
            evaluate(jaxpr) if each is None else execute_decision(inlined_program(jaxpr), each)
            for jaxpr, each in pairs
        ]
    )
    return lambda _: next(runs)
