"""A loop on flat lists of arrays, run over any stretch of its steps.

Every run is a `lax.scan` of known length over the positions of its steps; the inputs are read by
position, because slices of them would be copied at every level of a cut.
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
    """What is looped over.

    Attributes:
        step: `(constants, carry, x) -> (carry, y)`, all of them lists of arrays.
        length: Number of steps.
        reverse: Whether the first step reads the last position.
        unroll: Steps written out in each round of an innermost loop, as in `lax.scan`.
    """

    step: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    length: int
    reverse: bool
    unroll: int | bool

    def at(self, step: Any) -> Any:
        """The position of a step."""
        return self.length - 1 - step if self.reverse else step

    def unroll_of(self, level: Level) -> int | bool:
        """For the loop over a level's segments: innermost loops are those over single steps."""
        return self.unroll if level.size == 1 else 1

    def run(self, constants: Arrays, carry: Arrays, xs: Arrays, first: Any, count: int) -> Any:
        """Run `count` steps from step `first` on: the carry after them, their `y`s by position."""

        def step(carry: Arrays, at: Any) -> tuple[Arrays, Arrays]:
            return self.step(constants, carry, take(xs, at))

        low = self.length - first - count if self.reverse else first
        at = low + jnp.arange(count)
        return jax.lax.scan(step, carry, at, reverse=self.reverse, unroll=self.unroll)

    def skip(self, constants: Arrays, carry: Arrays, xs: Arrays, first: Any, count: int) -> Arrays:
        """The carry after `count` steps from step `first` on, and nothing else."""

        def step(carry: Arrays, i: Any) -> tuple[Arrays, None]:
            return self.step(constants, carry, take(xs, self.at(i)))[0], None

        if count <= 1:
            return step(carry, first)[0] if count else carry
        return jax.lax.scan(step, carry, first + jnp.arange(count), unroll=self.unroll)[0]

    def run_level(self, level: Level, constants: Arrays, carry: Arrays, xs: Arrays) -> Any:
        """All steps: the last carry, the `y`s by position, the carry before each segment."""
        firsts = level.rest + level.size * jnp.arange(level.segments)

        def segment(carry: Arrays, first: Any) -> tuple[Arrays, Any]:
            after, ys = self.run(constants, carry, xs, first, level.size)
            return after, (carry, ys)

        parts = []
        if level.rest:
            carry, ys = self.run(constants, carry, xs, 0, level.rest)
            parts = [ys]
        # Scanned by position as well, so that the blocks of `y`s come out in order.
        turn = slice(None, None, -1 if self.reverse else 1)
        options = {"reverse": self.reverse, "unroll": self.unroll_of(level)}
        carry, (starts, ys) = jax.lax.scan(segment, carry, firsts[turn], **options)
        parts.append([y.reshape(level.segments * level.size, *y.shape[2:]) for y in ys])
        ys = [jnp.concatenate(y) if level.rest else y[0] for y in zip(*parts[turn], strict=True)]
        return carry, ys, [x[turn] for x in starts]


def take(arrays: Arrays, at: Any) -> list[Any]:
    """The rows at one position."""
    return [jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for x in arrays]


def put(arrays: Arrays, rows: Arrays, at: Any) -> list[Any]:
    """The arrays with these rows at one position, written in place where XLA can."""
    write = partial(jax.lax.dynamic_update_index_in_dim, index=at, axis=0)
    return [write(x, row) for x, row in zip(arrays, rows, strict=True)]
