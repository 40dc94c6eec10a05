"""A function whose gradient saves what a decision says, for calls with any arguments."""

from collections.abc import Callable
from typing import Any

from jrc._errors import name_of, named_like, public
from jrc.remat._gradient.variable_changes import write_changes
from jrc.remat._planner.execute.execute import execute_decision
from jrc.remat._planner.plan.decision import AsWritten, Decision, Stages
from jrc.remat._planner.program.signature import Signature, signature_of
from jrc.remat._planner.program.trace import traced_for_plan


def apply_decision[F: Callable[..., Any]](
    fn: F, decision: Decision, signature: Signature, any_sizes: bool = False
) -> F:
    """Return a function whose gradient saves what is decided; see `Plan.apply`.

    Args:
        fn: The function.
        decision: What is saved and recomputed.
        signature: That of the program that the decision is for.
        any_sizes: Whether the program may be one of the same operators on other sizes: a chunk that
            is shorter than the others.
    """
    check_is_function(fn)

    @named_like(fn)
    @public("jrc.Plan.apply")
    def planned(*args: Any, **kwargs: Any) -> Any:
        respected = signature.respect_checkpoints
        traced = traced_for_plan(fn, args, kwargs, respected)
        found = signature_of(traced, respected)
        is_other_size = any_sizes and signature.inputs != found.inputs
        difference = (
            signature.other_operators(found) if is_other_size else signature.difference(found)
        )
        if (
            not difference
            and not is_other_size
            and isinstance(decision, AsWritten)
            and found.written != signature.written
        ):
            difference = "its jax.checkpoint regions, which the plan leaves as written, are others"
        check_is_same(difference, name_of(fn))
        is_as_it_is = isinstance(decision, AsWritten) or not traced.regions
        if is_as_it_is and not isinstance(decision, Stages):
            return fn(*args, **kwargs)
        if not isinstance(decision, Stages):
            run = traced.plain
        else:
            run = execute_decision(traced.program, decision)
        out, changes = traced.run(run)
        write_changes((args, kwargs), changes, name_of(fn))
        return out

    return planned  # type: ignore[return-value]


def check_is_function(fn: object) -> None:
    """Raise unless what a plan is applied to is a function."""
    if not callable(fn):
        raise TypeError(
            f"the argument must be a function, got {type(fn).__name__}. Pass the function "
            "that the plan was made for, and call what comes back."
        )


def check_is_same(difference: str | None, name: str) -> None:
    """Raise where the program of a function differs from that which a plan was made for.

    Args:
        difference: How, in words; `None` if it does not.
        name: What the function is called.
    """
    if difference:
        raise ValueError(
            f"this plan was made for another program than that of `{name}`: {difference}. Shapes, "
            "types, operators and their order must be those that jrc.plan saw; plan again with "
            "jrc.plan(fn, *args, budget=...)."
        )
