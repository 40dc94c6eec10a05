"""One recomputed region: a `jax.checkpoint` that saves the values named inside, and no others."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._jaxpr import (
    evaluate,
    inner_program,
    inner_programs,
    is_differentiated_region,
    mark_of,
    tag_of,
    walk,
)
from jrc.remat._policy.checkpoint_names import GROUP_SAVED, checkpoint_policy, is_own_name
from jrc.remat._policy.resolution import Policy

Run = Callable[..., Sequence[Any]]
Region = Callable[[Run, Sequence[Any]], Sequence[Any]]

_NAME = "jrc_region"


def recomputed_region(body: Run, inputs: Sequence[Any], has_barrier: bool = True) -> Sequence[Any]:
    """Run a body whose values are recomputed in the backward pass, except those saved by name.

    Args:
        body: The body.
        inputs: Its inputs.
        has_barrier: Whether a barrier keeps XLA from merging the recomputation with the first
            computation. Around the whole body of a loop there is none to be merged with.
    """
    is_saved = lambda name: name != GROUP_SAVED  # noqa: E731
    return _checkpoint(body, inputs, is_saved, _NAME, has_barrier)


def recomputed_group(body: Run, inputs: Sequence[Any]) -> Sequence[Any]:
    """Run a group of operators likewise; the values that it saves are no matter of other regions.

    A region around the group recomputes what has the name `GROUP_SAVED`.
    """
    return _checkpoint(body, inputs, lambda _: True, "jrc_group")


def named_region(body: Run) -> Run:
    """Return the body under the name by which `region_program` finds it."""

    def jrc_region(*inputs: Any) -> Sequence[Any]:
        return body(*inputs)

    return jrc_region


def region_program(eqn: Any) -> Any | None:
    """Return the program of a region of this package, `None` for any other equation.

    A region inside a region is not nested: the outer one runs this program, once.
    """
    # A region that is differentiated already is the backward pass, which keeps its barrier.
    if eqn.primitive.name == "jit" or is_differentiated_region(eqn):
        return None
    return next((p for p in inner_programs(eqn) if p.debug_info.func_name == _NAME), None)


def should_inline(policy: Policy) -> Callable[[Any], bool]:
    """Return which `jit` calls are written inline, beside those with marks.

    Those in which a rule names something, or with a region; one that a rule names stays a call.
    """
    return lambda eqn: (
        policy.action_of(eqn) is None and (policy.applies_inside(eqn) or _holds_region(eqn))
    )


def _holds_region(eqn: Any) -> bool:
    """Whether an equation is a region, or a `jit` call with one inside, and no tag."""
    if eqn.primitive.name != "jit" or tag_of(eqn) is not None:
        return region_program(eqn) is not None
    return any(map(_holds_region, inner_program(eqn).eqns))


def _checkpoint(
    body: Run,
    inputs: Sequence[Any],
    is_saved: Callable[[str], bool],
    name: str,
    has_barrier: bool = True,
) -> Sequence[Any]:
    jaxpr = jax.make_jaxpr(body)(*inputs)
    marks = (mark_of(eqn) for eqn, _ in walk(jaxpr))
    names = {mark[0] for mark in marks if mark and is_own_name(mark[0]) and is_saved(mark[0])}
    run = evaluate(jaxpr)

    def call(*inputs: Any) -> Sequence[Any]:
        return run(*inputs)

    call.__name__ = name
    policy = checkpoint_policy(sorted(names)) if names else None
    return jax.checkpoint(call, policy=policy, prevent_cse=has_barrier)(*inputs)
