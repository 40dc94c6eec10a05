"""A loop on flat lists of arrays, which can run any range of its steps.

Every range is a `lax.scan` of known length over the positions of its steps. The inputs are indexed
by position: slices of them would be copied at every level of the schedule.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jrc.remat._scan.schedule import Level

Arrays = Sequence[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """The body and the options of a loop.

    Attributes:
        step: `(constants, carry, x) -> (carry, y)`, all of them lists of arrays.
        length: The number of steps.
        reverse: Whether the first step reads the last position.
        unroll: Steps per iteration of an innermost loop, as in `lax.scan`.
    """

    step: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    length: int
    reverse: bool
    unroll: int | bool

    def at(self, step: Any) -> Any:
        """Return the position of a step in the inputs."""
        return self.length - 1 - step if self.reverse else step

    def unroll_of(self, level: Level) -> int | bool:
        """Return `unroll` for the loop over a level's segments: only single steps are unrolled."""
        return self.unroll if level.size == 1 else 1

    def run(self, constants: Arrays, carry: Arrays, xs: Arrays, first: Any, count: int) -> Any:
        """Run `count` steps from `first`; return the carry after them, and their `y`s."""

        def step(carry: Arrays, at: Any) -> tuple[Arrays, Arrays]:
            return self.step(constants, carry, take(xs, at))

        low = self.length - first - count if self.reverse else first
        at = low + jnp.arange(count)
        return jax.lax.scan(step, carry, at, reverse=self.reverse, unroll=self.unroll)

    def skip(self, constants: Arrays, carry: Arrays, xs: Arrays, first: Any, count: int) -> Arrays:
        """Run `count` steps from `first`; return the carry after them."""

        def step(carry: Arrays, i: Any) -> tuple[Arrays, None]:
            return self.step(constants, carry, take(xs, self.at(i)))[0], None

        if count <= 1:
            return step(carry, first)[0] if count else carry
        return jax.lax.scan(step, carry, first + jnp.arange(count), unroll=self.unroll)[0]

    def run_level(self, level: Level, constants: Arrays, carry: Arrays, xs: Arrays) -> Any:
        """Run all steps; return the last carry, the `y`s and the carry before each segment."""
        firsts = level.rest + level.size * jnp.arange(level.segments)

        def segment(carry: Arrays, first: Any) -> tuple[Arrays, Any]:
            after, ys = self.run(constants, carry, xs, first, level.size)
            return after, (carry, ys)

        parts = []
        if level.rest:
            carry, ys = self.run(constants, carry, xs, 0, level.rest)
            parts = [ys]
        # Scanned in the direction of the loop, so that the blocks of `y`s come out in order.
        order = slice(None, None, -1 if self.reverse else 1)
        options = {"reverse": self.reverse, "unroll": self.unroll_of(level)}
        carry, (starts, ys) = jax.lax.scan(segment, carry, firsts[order], **options)
        parts.append([y.reshape(level.segments * level.size, *y.shape[2:]) for y in ys])
        ys = [jnp.concatenate(y) if level.rest else y[0] for y in zip(*parts[order], strict=True)]
        return carry, ys, [x[order] for x in starts]


def take(arrays: Arrays, at: Any) -> list[Any]:
    """Return the rows at one position."""
    return [jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for x in arrays]


def put(arrays: Arrays, rows: Arrays, at: Any) -> list[Any]:
    """Return the arrays with these rows at one position, updated in place where XLA can."""
    write = partial(jax.lax.dynamic_update_index_in_dim, index=at, axis=0)
    return [write(x, row) for x, row in zip(arrays, rows, strict=True)]
