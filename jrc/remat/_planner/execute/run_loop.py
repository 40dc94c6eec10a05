"""Running a loop in segments that are recomputed, or in parts that have plans of their own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc.remat._region.rerun_scope import planned_scope

Body = Callable[..., Any]
Loop = Callable[..., tuple[Sequence[Any], Sequence[Any]]]


def scan_in_segments(
    segments: int,
    body: Body,
    carry: Sequence[Any],
    xs: Sequence[Any],
    *,
    length: int,
    reverse: bool,
    unroll: int,
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Run `lax.scan` in equal segments, each recomputed; steps that are left over run last.

    There are at most as many segments as steps.
    """
    segments = min(segments, length)
    size = length // segments
    scan = functools.partial(jax.lax.scan, body, reverse=reverse, unroll=unroll)
    rest = length - size * segments
    first = _steps(0, length - rest, length, reverse)
    last = _steps(length - rest, length, length, reverse)

    def segment(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, Any]:
        def flat(*inputs: Any) -> list[Any]:
            new, ys = scan(list(inputs[: len(carry)]), list(inputs[len(carry) :]), length=size)
            return [*new, *ys]

        # Not `recomputed_region`, which would save what the regions inside save. The backward pass
        # of several segments is a loop of its own: XLA has nothing there to merge it with.
        with planned_scope():
            results = jax.checkpoint(flat, prevent_cse=segments == 1)(*carry, *xs)
        return results[: len(carry)], results[len(carry) :]

    parts = [x[first].reshape(segments, size, *x.shape[1:]) for x in xs]
    carry, ys = jax.lax.scan(segment, list(carry), parts, length=segments, reverse=reverse)
    ys = [y.reshape(segments * size, *y.shape[2:]) for y in ys]
    if not rest:
        return carry, ys
    carry, more = scan(list(carry), [x[last] for x in xs], length=rest)
    return carry, _joined([ys, more], reverse)


def scan_in_parts(
    parts: Sequence[tuple[int, Callable[[], None], Loop]],
    body: Body,
    carry: Sequence[Any],
    xs: Sequence[Any],
    *,
    length: int,
    reverse: bool,
    unroll: int,
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Run `lax.scan` in parts, one after another.

    Args:
        parts: For each part, in the order in which they run: the number of its steps, what makes
            the body run under the part's decision, and what runs the loop. In a loop of another
            length the last parts have fewer steps, or the last one more.
        body: The body of the loop.
        carry: The carries.
        xs: What the loop goes over.
        length: The number of all steps.
        reverse: Whether the last step runs first.
        unroll: As for `lax.scan`.
    """
    found, done = [], 0
    for steps, select, loop in (*parts[:-1], (length, *parts[-1][1:])):
        steps = min(steps, length - done)
        if not steps:
            continue
        select()
        rows = _steps(done, done + steps, length, reverse)
        # A function of its own: JAX traces the same function once.
        part = lambda carry, xs: body(carry, xs)  # noqa: E731
        each = [x[rows] for x in xs]
        carry, ys = loop(part, list(carry), each, length=steps, reverse=reverse, unroll=unroll)
        found.append(ys)
        done += steps
    return carry, _joined(found, reverse)


def _steps(start: int, end: int, length: int, reverse: bool) -> slice:
    """The rows of the steps that run as number `start` up to `end`."""
    return slice(length - end, length - start) if reverse else slice(start, end)


def _joined(parts: Sequence[Sequence[Any]], reverse: bool) -> list[Any]:
    ordered = parts[::-1] if reverse else parts
    return [jnp.concatenate(each) for each in zip(*ordered, strict=True)]
