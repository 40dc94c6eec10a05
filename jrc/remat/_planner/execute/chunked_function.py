"""A function with regions of its program in chunks: what the rest of a plan is made for."""

from collections.abc import Callable, Sequence
from typing import Any

from jrc._errors import name_of, named_like, public
from jrc.remat._chunks.chunks import Chunks
from jrc.remat._chunks.rewrite import in_chunks
from jrc.remat._chunks.run_in_chunks import PlanOne, as_it_is
from jrc.remat._gradient.variable_changes import write_changes
from jrc.remat._planner.execute.apply_decision import (
    apply_decision,
    check_is_function,
    check_is_same,
)
from jrc.remat._planner.plan.decision import Decision
from jrc.remat._planner.program.signature import Signature, signature_of
from jrc.remat._planner.program.trace import traced_for_plan


def chunked_function[F: Callable[..., Any]](
    fn: F,
    chunks: Sequence[Chunks],
    respect_checkpoints: bool,
    signature: Signature | None,
    plan_one: PlanOne = as_it_is,
) -> F:
    """Return the function with regions in chunks, without `jax.checkpoint` regions of its own.

    Args:
        fn: The function.
        chunks: The regions.
        respect_checkpoints: As for `traced_for_plan`.
        signature: That of the program that the regions are of; `None` where that is known.
        plan_one: As for `in_chunks`.

    Raises:
        TypeError: If the function is none.
        ValueError: When called, if the program of the function is another.
    """
    check_is_function(fn)

    @named_like(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        traced = traced_for_plan(fn, args, kwargs, respect_checkpoints)
        if signature is not None:
            difference = signature.difference(signature_of(traced, respect_checkpoints))
            check_is_same(difference, name_of(fn))
        whole = in_chunks(traced.program, chunks, plan_one)
        out, changes = traced.run(whole)
        write_changes((args, kwargs), changes, name_of(fn))
        return out

    return run  # type: ignore[return-value]


def planned_chunks[F: Callable[..., Any]](
    fn: F, chunks: Sequence[Chunks], whole: Signature, decision: Decision, signature: Signature
) -> F:
    """Return the function whose loss runs in chunks, each under a decision.

    Args:
        fn: The function.
        chunks: The whole loss, and behind it regions inside of one of its chunks.
        whole: The signature of the program that the region is of.
        decision: What of a chunk is saved and recomputed.
        signature: That of the program of a chunk.
    """
    loss, *inside = chunks
    plan_one = plan_of_chunk(decision, signature, inside)
    run = chunked_function(fn, [loss], signature.respect_checkpoints, whole, plan_one)
    return public("jrc.Plan.apply")(run)


def plan_of_chunk(
    decision: Decision, signature: Signature, inside: Sequence[Chunks] = ()
) -> PlanOne:
    """Return what puts the function of one chunk of the whole loss under a decision.

    The last chunk may be shorter than that which the decision is for.

    Args:
        decision: What of it is saved and recomputed.
        signature: That of its program, with the regions in chunks.
        inside: Regions of it that run in chunks themselves.
    """

    def plan_one(one: Callable[..., Any], loss: int) -> Callable[..., Any]:
        fn = loss_first(one, loss, inside, signature.respect_checkpoints)
        planned = apply_decision(fn, decision, signature, any_sizes=True)
        return lambda *args: planned(*args)[1]

    return plan_one


def loss_first(
    one: Callable[..., Any],
    loss: int,
    inside: Sequence[Chunks] = (),
    respect_checkpoints: bool = False,
) -> Callable[..., Any]:
    """Return the function of one chunk, which returns its loss, and then all results.

    Args:
        one: The function that returns all results.
        loss: Which of them is the loss.
        inside: Regions of it that run in chunks.
        respect_checkpoints: As for `chunked_function`.
    """

    def run(*args: Any) -> tuple[Any, Any]:
        made = one(*args)
        return made[loss], made

    return chunked_function(run, inside, respect_checkpoints, None) if inside else run
