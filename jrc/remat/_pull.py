"""The backward pass of a loop that holds few carries.

What it adds up (the cotangents of the carry, of the constants, of the inputs) travels as ONE state
through all levels of the cut, so that a level costs carries and nothing else: an accumulator of
its own at each level would hold all parameters once more, and add them once more.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrc.remat._barrier import barrier
from jrc.remat._levels import Level
from jrc.remat._loop import Arrays, Loop, put, take

Levels = tuple[Level, ...]


def with_few_carries(loop: Loop, levels: Levels) -> Callable[..., Any]:
    """The loop as a function of `(constants, carry, xs)`, differentiated level by level."""

    @jax.custom_vjp
    def call(constants: Arrays, carry: Arrays, xs: Arrays) -> Any:
        return loop.run(constants, carry, xs, 0, loop.length)

    def forward(constants: Arrays, carry: Arrays, xs: Arrays) -> Any:
        last, ys, starts = loop.run_level(levels[0], constants, carry, xs)
        return (last, ys), (constants, carry, xs, starts)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (constants, carry, xs, starts), cotangents = barrier((residuals, cotangents))
        pull = Pull(loop, constants, xs, _floats(cotangents[1]))
        zeros = [[jnp.zeros_like(x) for x in _floats(group)] for group in (constants, xs)]
        state = (_floats(cotangents[0]), *zeros)
        to_carry, to_constants, to_xs = pull.segments(levels, starts, carry, 0, state)
        return _holes(to_constants, constants), _holes(to_carry, carry), _holes(to_xs, xs)

    call.defvjp(forward, backward)
    return call


@dataclasses.dataclass(frozen=True, eq=False)
class Pull:
    """Takes cotangents from the last step to the first.

    The state is `(to_carry, to_constants, to_xs)`: what has come so far of those that carry a
    gradient. `first` is the first step of a stretch, `carry` the carry before it.

    Attributes:
        loop: The loop.
        constants: What its body closes over.
        xs: Its inputs, shapes `(N, ...)`.
        from_ys: The cotangents of its outputs, shapes `(N, ...)`.
    """

    loop: Loop
    constants: Arrays
    xs: Arrays
    from_ys: Arrays

    def stretch(self, levels: Levels, carry: Arrays, first: Any, state: Any) -> Any:
        """Through a stretch of which only the first carry is known."""
        if not levels:
            return self.step(carry, first, state)
        starts = self.starts(levels[0], carry, first)
        return self.segments(levels, starts, carry, first, state)

    def segments(
        self, levels: Levels, starts: Arrays, carry: Arrays, first: Any, state: Any
    ) -> Any:
        """Through a stretch, its segments last first, given the carry before each."""
        level, inner = levels[0], levels[1:]

        def segment(state: Any, at: Any) -> tuple[Any, None]:
            k, start = at
            return self.stretch(inner, start, first + level.rest + k * level.size, state), None

        at = (jnp.arange(level.segments), starts)
        state, _ = jax.lax.scan(segment, state, at, reverse=True, unroll=self.loop.unroll_of(level))
        if level.rest:
            state = self.stretch((Level(0, level.rest, 1),), carry, first, state)
        return state

    def starts(self, level: Level, carry: Arrays, first: Any) -> Arrays:
        """Run a stretch again up to its last segment: the carry before each segment."""
        carry = self.skip(carry, first, level.rest)
        first = first + level.rest - level.size
        # Written in place: to stack all but the last and join them would hold them twice.
        held = [jnp.broadcast_to(x, (level.segments, *x.shape)) for x in carry]

        def segment(at: Any, k: Any) -> tuple[Any, None]:
            carry, held = at
            carry = self.skip(carry, first + k * level.size, level.size)
            return (carry, put(held, carry, k)), None

        if level.segments == 1:
            return held
        ks = jnp.arange(1, level.segments)
        return jax.lax.scan(segment, (carry, held), ks, unroll=self.loop.unroll_of(level))[0][1]

    def skip(self, carry: Arrays, first: Any, count: int) -> Arrays:
        """The carry after `count` steps."""
        return self.loop.skip(self.constants, carry, self.xs, first, count)

    def step(self, carry: Arrays, first: Any, state: Any) -> Any:
        """Through one step, which runs a last time, now with its derivative."""
        from_carry, to_constants, to_xs = state
        at = self.loop.at(first)
        groups = (self.constants, carry, take(self.xs, at))

        def floats(*parts: Arrays) -> Any:
            carry, y = self.loop.step(*map(_fill, groups, parts))
            return _floats(carry), _floats(y)

        _, pull = jax.vjp(floats, *map(_floats, groups))
        more, to_carry, to_x = pull((from_carry, take(self.from_ys, at)))
        added = [a + b for a, b in zip(to_constants, more, strict=True)]
        return to_carry, added, put(to_xs, to_x, at)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floats(arrays: Arrays) -> list[Any]:
    """The arrays that carry a gradient; the cotangents of others are of no such type either."""
    return [x for x in arrays if _is_float(x)]


def _fill(arrays: Arrays, floats: Arrays) -> list[Any]:
    """The arrays with new ones for those that carry a gradient."""
    new = iter(floats)
    return [next(new) if _is_float(x) else x for x in arrays]


def _holes(floats: Arrays, like: Arrays) -> list[Any]:
    """A cotangent for each array, `None` for integers and keys, which have none."""
    new = iter(floats)
    return [next(new) if _is_float(x) else None for x in like]
