"""The backward pass of a loop that holds few carries.

What it adds up (the cotangents of the carry, of the constants, of the inputs) travels as ONE state
through all levels of the cut, so that a level costs carries and nothing else: an accumulator of
its own at each level would hold all parameters once more, and add them once more.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._tree import is_floating
from jrc.remat._region.barrier import barrier
from jrc.remat._region.perturbed import Perturbed, dense, primal_values, read_results
from jrc.remat._region.rerun_scope import rerun_scope, separate_rerun_scope
from jrc.remat._scan.loop import Arrays, Loop, put, take
from jrc.remat._scan.schedule import Level

Levels = tuple[Level, ...]


def scan_with_saved_carries(loop: Loop, levels: Levels) -> Callable[..., Any]:
    """The loop as a function of `(constants, carry, xs)`, differentiated level by level."""

    @jax.custom_vjp
    def call(constants: Arrays, carry: Arrays, xs: Arrays) -> Any:
        return loop.run(constants, carry, xs, 0, loop.length)

    def forward(*primals: Arrays) -> Any:
        groups, perturbed = zip(*map(primal_values, primals), strict=True)
        last, ys, starts = loop.run_level(levels[0], *groups)
        return (last, ys), (*groups, starts, _with_carry(loop, groups, perturbed))

    def backward(residuals: Any, cotangents: Any) -> Any:
        perturbed, read = residuals[-1], read_results(cotangents[1])
        # A `y` that nobody reads has no cotangent, which would be as long as the loop.
        arriving = perturbed[1].pick(map(dense, cotangents[0])), read.pick(cotangents[1])
        (*groups, starts, _), (from_carry, from_ys) = barrier((residuals, arriving))
        constants, carry, xs = groups
        pull = BackwardPass(loop, constants, xs, from_ys, perturbed, read)
        zeros = [[jnp.zeros_like(x) for x in perturbed[i].pick(groups[i])] for i in (0, 2)]
        state = pull.segments(levels, starts, carry, 0, (from_carry, *zeros))
        to_carry, to_constants, to_xs = state
        to = to_constants, to_carry, to_xs
        return tuple(m.spread(arrays) for m, arrays in zip(perturbed, to, strict=True))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardPass:
    """Takes cotangents from the last step to the first.

    The state is `(to_carry, to_constants, to_xs)`: what has come so far of those that carry a
    gradient. `first` is the first step of a stretch, `carry` the carry before it.

    Attributes:
        loop: The loop.
        constants: What its body closes over.
        xs: Its inputs, shapes `(N, ...)`.
        from_ys: The cotangents of those outputs that are read, shapes `(N, ...)`.
        moving: Which constants, carries and inputs are differentiated.
        read: Which outputs are read.
    """

    loop: Loop
    constants: Arrays
    xs: Arrays
    from_ys: Arrays
    perturbed: tuple[Perturbed, Perturbed, Perturbed]
    read: Perturbed

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
        with separate_rerun_scope():
            return self.loop.skip(self.constants, carry, self.xs, first, count)

    def step(self, carry: Arrays, first: Any, state: Any) -> Any:
        """Through one step, which runs a last time, now with its derivative."""
        from_carry, to_constants, to_xs = state
        at = self.loop.at(first)
        groups = (self.constants, carry, take(self.xs, at))

        def floats(*parts: Arrays) -> Any:
            filled = [m.fill(*both) for m, *both in zip(self.perturbed, groups, parts, strict=True)]
            with rerun_scope():
                carry, y = self.loop.step(*filled)
            return self.perturbed[1].pick(carry), self.read.pick(y)

        parts = [m.pick(group) for m, group in zip(self.perturbed, groups, strict=True)]
        _, pull = jax.vjp(floats, *parts)
        more, to_carry, to_x = pull((from_carry, take(self.from_ys, at)))
        added = [a + b for a, b in zip(to_constants, more, strict=True)]
        return to_carry, added, put(to_xs, to_x, at)


def _with_carry(
    loop: Loop, groups: Sequence[Arrays], perturbed: Sequence[Perturbed]
) -> tuple[Perturbed, ...]:
    """What is differentiated, with the carries that come to depend on it, as in `lax.scan`."""
    constants, carry, xs = perturbed
    while True:
        reached = _reached(loop, groups, (constants, carry, xs))
        more = Perturbed(tuple(a or b for a, b in zip(carry.flags, reached, strict=True)))
        if more == carry:
            return constants, carry, xs
        carry = more


def _reached(loop: Loop, groups: Sequence[Arrays], perturbed: Sequence[Perturbed]) -> list[bool]:
    """The carries behind one step that depend on what is differentiated, asked of JAX itself.

    It calls the forward rule of an identity if, and only if, a derivative flows through it.
    """
    reached = [False] * len(groups[1])

    def step(*parts: Arrays) -> list[Any]:
        filled = [m.fill(*both) for m, *both in zip(perturbed, groups, parts, strict=True)]
        constants, carry, xs = filled
        after, _ = loop.step(constants, carry, take(xs, 0))
        return [_watch(reached, i)(x) for i, x in enumerate(after) if is_floating(x)]

    parts = [m.pick(group) for m, group in zip(perturbed, groups, strict=True)]
    jax.eval_shape(lambda *parts: jax.vjp(step, *parts)[0], *parts)
    return reached


def _watch(reached: list[bool], i: int) -> Callable[[Any], Any]:
    @jax.custom_vjp
    def watch(x: Any) -> Any:
        return x

    def forward(x: Any) -> tuple[Any, None]:
        reached[i] = True
        return x, None

    watch.defvjp(forward, lambda _, cotangent: (cotangent,))
    return watch
