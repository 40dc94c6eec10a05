"""A function with regions of its program in chunks: what the rest of a plan is made for."""

from collections.abc import Callable, Sequence
from typing import Any

from jrc._errors import name_of, named_like
from jrc.remat._chunks.rewrite import Chunks, in_chunks
from jrc.remat._gradient.variable_changes import write_changes
from jrc.remat._planner.program.signature import signature_of
from jrc.remat._planner.program.trace import inlined_program, traced_for_plan


def chunked_function[F: Callable[..., Any]](
    fn: F, chunks: Sequence[Chunks], respect_checkpoints: bool, digest: str
) -> F:
    """Return the function with regions in chunks, without `jax.checkpoint` regions of its own.

    Args:
        fn: The function.
        chunks: The regions.
        respect_checkpoints: As for `traced_for_plan`.
        digest: The digest of the program that the regions are of.

    Raises:
        ValueError: When called, if the program of the function is another.
    """

    @named_like(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        traced = traced_for_plan(fn, args, kwargs, respect_checkpoints)
        if signature_of(traced, respect_checkpoints).digest != digest:
            raise ValueError(
                f"this plan was made for another program than that of `{name_of(fn)}`. Shapes, "
                "types, operators and their order must be those that jrc.plan saw; plan again with "
                "jrc.plan(fn, *args, budget=...)."
            )
        out, changes = traced.run(in_chunks(traced.program, chunks, inlined_program))
        write_changes((args, kwargs), changes, name_of(fn))
        return out

    return run  # type: ignore[return-value]
