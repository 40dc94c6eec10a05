"""The backward pass of a loop that saves few carries.

The accumulated cotangents (of the carry, of the constants, of the inputs) are ONE state that passes
through all levels of the schedule, so that a level costs carries and nothing else. An accumulator
of its own at each level would store and add the gradients of all parameters once more.
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
    """Return the loop as a function of `(constants, carry, xs)` with the derivative of `levels`."""

    @jax.custom_vjp
    def call(constants: Arrays, carry: Arrays, xs: Arrays) -> Any:
        return loop.run(constants, carry, xs, 0, loop.length)

    def forward(*primals: Arrays) -> Any:
        groups, perturbed = zip(*map(primal_values, primals), strict=True)
        last, ys, starts = loop.run_level(levels[0], *groups)
        return (last, ys), (*groups, starts, _with_carry(loop, groups, perturbed))

    def backward(residuals: Any, cotangents: Any) -> Any:
        perturbed, read = residuals[-1], read_results(cotangents[1])
        # A `y` that nothing reads has no cotangent: its zeros would be as long as the loop.
        incoming = perturbed[1].pick(map(dense, cotangents[0])), read.pick(cotangents[1])
        (*groups, starts, _), (from_carry, from_ys) = barrier((residuals, incoming))
        constants, carry, xs = groups
        backward_pass = BackwardPass(loop, constants, xs, from_ys, perturbed, read)
        zeros = [[jnp.zeros_like(x) for x in perturbed[i].pick(groups[i])] for i in (0, 2)]
        state = backward_pass.segments(levels, starts, carry, 0, (from_carry, *zeros))
        to_carry, to_constants, to_xs = state
        to_groups = to_constants, to_carry, to_xs
        return tuple(m.spread(arrays) for m, arrays in zip(perturbed, to_groups, strict=True))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardPass:
    """Propagates cotangents from the last step to the first.

    The state is `(to_carry, to_constants, to_xs)`: the cotangents so far, of perturbed arrays only.
    In the methods `first` is the first step of a range, and `carry` the carry before it.

    Attributes:
        loop: The loop.
        constants: The arrays that its body closes over.
        xs: Its inputs, shapes `(N, ...)`.
        from_ys: The cotangents of the outputs that are read, shapes `(N, ...)`.
        perturbed: Which constants, carries and inputs are differentiated.
        read: Which outputs are read.
    """

    loop: Loop
    constants: Arrays
    xs: Arrays
    from_ys: Arrays
    perturbed: tuple[Perturbed, Perturbed, Perturbed]
    read: Perturbed

    def range(self, levels: Levels, carry: Arrays, first: Any, state: Any) -> Any:
        """Propagate through a range of steps, given the carry before it."""
        if not levels:
            return self.step(carry, first, state)
        starts = self.starts(levels[0], carry, first)
        return self.segments(levels, starts, carry, first, state)

    def segments(
        self, levels: Levels, starts: Arrays, carry: Arrays, first: Any, state: Any
    ) -> Any:
        """Propagate through a range, its last segment first, given the carry before each."""
        level, inner = levels[0], levels[1:]

        def segment(state: Any, at: Any) -> tuple[Any, None]:
            k, start = at
            return self.range(inner, start, first + level.rest + k * level.size, state), None

        at = (jnp.arange(level.segments), starts)
        state, _ = jax.lax.scan(segment, state, at, reverse=True, unroll=self.loop.unroll_of(level))
        if level.rest:
            state = self.range((Level(0, level.rest, 1),), carry, first, state)
        return state

    def starts(self, level: Level, carry: Arrays, first: Any) -> Arrays:
        """Recompute a range up to its last segment; return the carry before each segment."""
        carry = self.skip(carry, first, level.rest)
        first = first + level.rest - level.size
        # Updated in place: concatenating the first carry and the others would store them twice.
        starts = [jnp.broadcast_to(x, (level.segments, *x.shape)) for x in carry]

        def segment(at: Any, k: Any) -> tuple[Any, None]:
            carry, starts = at
            carry = self.skip(carry, first + k * level.size, level.size)
            return (carry, put(starts, carry, k)), None

        if level.segments == 1:
            return starts
        ks = jnp.arange(1, level.segments)
        return jax.lax.scan(segment, (carry, starts), ks, unroll=self.loop.unroll_of(level))[0][1]

    def skip(self, carry: Arrays, first: Any, count: int) -> Arrays:
        """Recompute `count` steps; return the carry after them."""
        with separate_rerun_scope():
            return self.loop.skip(self.constants, carry, self.xs, first, count)

    def step(self, carry: Arrays, first: Any, state: Any) -> Any:
        """Recompute one step and propagate through it."""
        from_carry, to_constants, to_xs = state
        at = self.loop.at(first)
        groups = (self.constants, carry, take(self.xs, at))

        def perturbed_step(*parts: Arrays) -> Any:
            filled = [m.fill(*both) for m, *both in zip(self.perturbed, groups, parts, strict=True)]
            with rerun_scope():
                carry, y = self.loop.step(*filled)
            return self.perturbed[1].pick(carry), self.read.pick(y)

        parts = [m.pick(group) for m, group in zip(self.perturbed, groups, strict=True)]
        _, step_vjp = jax.vjp(perturbed_step, *parts)
        more, to_carry, to_x = step_vjp((from_carry, take(self.from_ys, at)))
        added = [a + b for a, b in zip(to_constants, more, strict=True)]
        return to_carry, added, put(to_xs, to_x, at)


def _with_carry(
    loop: Loop, groups: Sequence[Arrays], perturbed: Sequence[Perturbed]
) -> tuple[Perturbed, ...]:
    """Return what is perturbed, with the carries that depend on it, as `lax.scan` has it."""
    constants, carry, xs = perturbed
    while True:
        reached = _perturbed_carries(loop, groups, (constants, carry, xs))
        more = Perturbed(tuple(a or b for a, b in zip(carry.flags, reached, strict=True)))
        if more == carry:
            return constants, carry, xs
        carry = more


def _perturbed_carries(
    loop: Loop, groups: Sequence[Arrays], perturbed: Sequence[Perturbed]
) -> list[bool]:
    """Return which carries after one step depend on perturbed arrays.

    JAX finds it out: it calls the forward rule of a `custom_vjp` identity only if the identity's
    argument is perturbed.
    """
    reached = [False] * len(groups[1])

    def step(*parts: Arrays) -> list[Any]:
        filled = [m.fill(*both) for m, *both in zip(perturbed, groups, parts, strict=True)]
        constants, carry, xs = filled
        after, _ = loop.step(constants, carry, take(xs, 0))
        return [_recording_identity(reached, i)(x) for i, x in enumerate(after) if is_floating(x)]

    parts = [m.pick(group) for m, group in zip(perturbed, groups, strict=True)]
    jax.eval_shape(lambda *parts: jax.vjp(step, *parts)[0], *parts)
    return reached


def _recording_identity(reached: list[bool], i: int) -> Callable[[Any], Any]:
    """Return an identity that sets `reached[i]` if its argument is perturbed."""

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    def forward(x: Any) -> tuple[Any, None]:
        reached[i] = True
        return x, None

    identity.defvjp(forward, lambda _, cotangent: (cotangent,))
    return identity
