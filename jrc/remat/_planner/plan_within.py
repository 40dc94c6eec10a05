"""The plan of a function inside of a larger program, such as a train step."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jrc._errors import named_like
from jrc._progress import shown_meanwhile
from jrc._tree import aval_of
from jrc.remat._planner.budget import checked_budget
from jrc.remat._planner.costs.host_link import HostLink
from jrc.remat._planner.make_plan import fingerprint_of, plan_of_process_0
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.search.candidates import Candidate
from jrc.remat._planner.search.compilations import compilation_limits
from jrc.remat._planner.search.compiled_cost import CompiledCost, compiled_cost
from jrc.remat._planner.search.problem import PlanningProblem
from jrc.remat._planner.search.search import choose


def plan_within(
    fn: Callable[..., Any],
    lower: Callable[[Callable[..., Any]], jax.stages.Lowered],
    budget: int | str | float,
    who: str,
    has_aux: Callable[[Any], bool],
    platform: str | None = None,
    split: bool = False,
    respect_checkpoints: bool = False,
    link: HostLink | None = None,
    on_target: bool = False,
    compilations: int | None = None,
) -> Plan:
    """Return the plan for a function inside of a larger program, whose whole peak is to fit.

    Args:
        fn: A function that the program calls by position and differentiates by its first argument.
        lower: The program, lowered, with another function in the place of this one.
        budget: As for `plan`.
        who: The public function, for errors.
        has_aux: Of what `fn` returned, whether it is `(loss, aux)`.
        platform: What the program is lowered for; by default JAX's own.
        split: Whether XLA splits the program over devices, so that predictions are calibrated.
        respect_checkpoints: As for `plan`.
        link: What copies to the host cost, where saved values may be moved there.
        on_target: Whether the program is lowered for an accelerator that is not there.
        compilations: As for `plan`.

    Returns:
        The plan; its FLOPs are those of the function's gradient, counted where it is traced.
    """
    limit = checked_budget(budget, who)
    limits = compilation_limits(compilations, on_target, link is not None)

    def found() -> Plan:
        problem = _problem_within(
            fn, lower, who, has_aux, respect_checkpoints, platform, link, split, limits
        )
        known: dict[str, CompiledCost] = {}

        @functools.cache
        def compiled(candidate: Candidate) -> CompiledCost:
            applied = problem.applied(candidate, fn)

            @named_like(fn)
            def followed(*args: Any) -> Any:
                # Only while the larger program is traced do its mesh axes have names.
                problem.follow(candidate)
                return applied(*args)

            lowered = lower(followed)
            text = fingerprint_of(lowered)
            if text not in known:
                known[text] = compiled_cost(lowered, platform, counts_sent=split)
            return known[text]

        return choose(problem, limit, compiled, who)

    with shown_meanwhile(f"{who}: tracing and solving"):
        return plan_of_process_0(found, who)


def _inside(
    fn: Callable[..., Any],
    lower: Callable[[Callable[..., Any]], jax.stages.Lowered],
    find: Callable[[], Any],
) -> Any:
    """Return what `find` returns where the larger program calls the function."""
    found: list[Any] = []

    @named_like(fn)
    def finding(*args: Any) -> Any:
        if not found:
            found.append(find())
        return fn(*args)

    lower(finding)
    return found[0]


def _problem_within(
    fn: Callable[..., Any],
    lower: Callable[[Callable[..., Any]], jax.stages.Lowered],
    who: str,
    has_aux: Callable[[Any], bool],
    respect_checkpoints: bool,
    platform: str | None,
    link: HostLink | None,
    split: bool,
    limits: tuple[int, int | None],
) -> PlanningProblem:
    """The planning problem of a function, for the arguments that a larger program calls it with."""
    found: list[PlanningProblem] = []

    @named_like(fn)
    def recorded(*args: Any) -> Any:
        out = fn(*args)
        if not found:
            avals = jax.tree.map(_aval_within, args)
            found.append(
                PlanningProblem.of(
                    fn,
                    avals,
                    0,
                    has_aux(out),
                    who,
                    compilations=limits[0],
                    most=limits[1],
                    respect_checkpoints=respect_checkpoints,
                    platform=platform,
                    link=link,
                    split=split,
                    inside=functools.partial(_inside, fn, lower),
                )
            )
        return out

    lower(recorded)
    (problem,) = found
    return problem


def _aval_within(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the abstract value of an argument, on the mesh of the `shard_map` that is traced.

    Without the mesh, an argument has another type than what is computed from it. Programs that
    compare the two (a state of equinox) would raise.
    """
    aval = aval_of(leaf)
    if aval.sharding is None and isinstance(leaf, jax.core.Tracer):
        return aval.update(sharding=jax.typeof(leaf).sharding)
    return aval
