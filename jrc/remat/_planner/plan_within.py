"""The plan of a function inside of a larger program, such as a train step."""

from collections.abc import Callable
from typing import Any

import jax

from jrc._errors import named_like, running_name
from jrc._progress import shown_meanwhile
from jrc._tree import aval_of
from jrc.remat._planner.budget import checked_budget, checked_compilations
from jrc.remat._planner.costs.cost_unit import Minimize
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.plan.plan_of_process_0 import plan_of_process_0
from jrc.remat._planner.search.choose import plan_for
from jrc.remat._planner.search.peaks import Peaks
from jrc.remat._planner.search.problem import Problem, Request


def plan_within(
    fn: Callable[..., Any],
    lower: Callable[[Callable[..., Any]], jax.stages.Lowered],
    budget: int | str | float,
    has_aux: Callable[[Any], bool],
    platform: str | None = None,
    placed: Callable[[Any], Any] | None = None,
    respect_checkpoints: bool = False,
    copy_bandwidth: float | None = None,
    target: str = "",
    compilations: int | None = None,
    minimize: Minimize = "time",
) -> Plan:
    """Return the plan for a function inside of a larger program, whose whole peak is to fit.

    Args:
        fn: A function that the program calls by position and differentiates by its first argument.
        lower: The program, lowered, with another function in the place of this one.
        budget: As for `plan`.
        has_aux: Of what `fn` returned, whether it is `(loss, aux)`.
        platform: What the program is lowered for; by default JAX's own.
        placed: From the types of the arguments to these with the shardings that XLA gives them,
            which is not seen inside of the program.
        respect_checkpoints: As for `plan`.
        copy_bandwidth: Bytes per second of copies to the host, where saved values may move there.
        target: The accelerator that the program is lowered for, where it is not there.
        compilations: As for `plan`.
        minimize: As for `plan`.

    Returns:
        The plan; its FLOPs are those of the function's gradient, counted where it is traced.
    """
    limit = checked_budget(budget)
    most = checked_compilations(compilations)
    found: list[Problem] = []

    @named_like(fn)
    def recorded(*args: Any) -> Any:
        out = fn(*args)
        if not found:
            avals = jax.tree.map(_aval_within, args)
            request = Request(
                fn,
                avals if placed is None else placed(avals),
                has_aux=has_aux(out),
                respect_checkpoints=respect_checkpoints,
                target=target,
                platform=platform,
                copy_bandwidth=copy_bandwidth,
                program=lower,
                minimize=minimize,
            )
            found.append(Problem.of(request))
        return out

    def find() -> Plan:
        lower(recorded)
        return plan_for(Peaks(found[0]), limit, most, chunks=True)

    with shown_meanwhile(f"{running_name()}: tracing and solving"):
        return plan_of_process_0(find)


def _aval_within(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the abstract value of an argument, on the mesh of the `shard_map` that is traced.

    Without the mesh, an argument has another type than what is computed from it. Programs that
    compare the two (a state of equinox) would raise.
    """
    aval = aval_of(leaf)
    if aval.sharding is None and isinstance(leaf, jax.core.Tracer):
        return aval.update(sharding=jax.typeof(leaf).sharding)
    return aval
