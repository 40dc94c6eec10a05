"""Running what a program computes slice by slice as a loop over chunks.

Where all results are sums, the loop computes the gradient of a chunk beside its value, so that
nothing runs again in the backward pass. Elsewhere each chunk is recomputed in the backward pass.
Sums over chunks, those of gradients too, have at least the precision of float32. Where the number
of chunks does not divide the axis the last chunk is shorter, and runs behind the loop.

>>> import jax, jax.numpy as jnp
>>> from jrc._jaxpr import Program, independent_axes, sliced
>>> loss = lambda x, w: jnp.mean(jnp.tanh(x @ w))
>>> x, w = jnp.ones((8, 3)), jnp.ones((3, 4))
>>> program = Program(jax.make_jaxpr(loss)(x, w))
>>> slices = sliced(program, {program.jaxpr.invars[0]: 0}, independent_axes)
>>> (mean,) = program_in_chunks(slices, 4)(x, w)
>>> bool(jnp.allclose(mean, loss(x, w)))
True
"""

from collections.abc import Callable, Mapping, Sequence, Set
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from jrc._jaxpr import INPUT, Slices, counted, evaluate, is_variable, slice_program
from jrc._tree import is_floating
from jrc.remat._chunks.counts import sizes
from jrc.remat._chunks.steps import Scan, in_loop, in_turn
from jrc.remat._chunks.sum_and_gradient import (
    Inputs,
    added,
    can_pair,
    raised,
    sum_and_gradient,
    zeros_for,
)
from jrc.remat._gradient.activity import active_variables

PlanOne = Callable[[Any, int], Any]
"""From the function of one chunk, and which of its results is the loss, to what runs instead."""


def as_it_is(one: Any, loss: int) -> Any:
    """Return the function of one chunk as it is."""
    return one


def program_in_chunks(slices: Slices, chunks: int) -> Callable[..., list[Any]]:
    """Return the program as a function of its inputs that runs slices in a loop over chunks.

    Args:
        slices: What of the program runs on slices.
        chunks: How many slices, see `sizes`.
    """
    program = slices.program
    after = program.cut(slices.after, [v for p in slices.after for v in program.eqns[p].outvars])
    wanted = [v for v in (*after.invars, *program.jaxpr.outvars) if is_variable(v)]
    looped = [v for v in dict.fromkeys(wanted) if v in slices.made]
    late = {*looped, *after.outvars}
    whole = [v for v in (*wanted, *slices.read) if v not in late]
    live = program.live(whole)
    before = program.cut(
        [p for p in range(len(live)) if live[p] and p not in slices.run],
        [v for v in dict.fromkeys(whole) if program.producer[v] != INPUT],
    )

    def run(*inputs: Any) -> list[Any]:
        values: dict[Any, Any] = dict(zip(program.jaxpr.invars, inputs, strict=True))
        values |= program.constants
        _run(before, values)
        made = run_in_chunks(slices, chunks, values, looped) if looped else []
        values |= dict(zip(looped, made, strict=True))
        _run(after, values)
        return program.results(values)

    return run


def _run(part: Any, values: dict[Any, Any]) -> None:
    results = evaluate(part)(*(values[v] for v in part.invars))
    values |= dict(zip(part.outvars, results, strict=True))


def run_in_chunks(
    slices: Slices,
    chunks: int,
    values: Mapping[Any, Any],
    results: Sequence[Any],
    recompute: bool = True,
    plan_one: PlanOne = as_it_is,
    loss: int | None = None,
    differentiated: Set[Any] = frozenset(),
    are_in_turn: bool = False,
) -> list[Any]:
    """Run what is computed slice by slice, and return results of it.

    Args:
        slices: What runs on slices.
        chunks: How many slices, see `sizes`.
        values: The values of what is read whole, and of what is cut.
        results: Values that the slices make, which are joined, and sums.
        recompute: Whether each chunk is recomputed in the backward pass, where results are no sums.
        plan_one: From the function of one chunk, and `loss`, to what runs in its place.
        loss: Of the whole loss in chunks, which of the results is differentiated; else `None`, and
            chunks are not planned.
        differentiated: Results whose derivatives are all wanted, as far as that is known. Where
            there are several the gradient of each would be a pass, so that chunks are recomputed.
        are_in_turn: Whether chunks follow each other in the program, and there is no loop.
    """
    scan = in_turn if are_in_turn else in_loop
    sums = [v for v in results if v in slices.sums]
    joined = [v for v in results if v not in slices.sums]
    cuts = _Cuts(slices, chunks)
    made = [*sums, *joined]
    program = slice_program(slices, cuts.share, made)
    functions: list[Any] = [evaluate(program)]
    if cuts.rest:
        functions.append(evaluate(slice_program(slices, cuts.rest, made)))
    if loss is not None:
        functions = [plan_one(one, loss) for one in functions]
    numbers = [jnp.arange(*x.shape, dtype=x.dtype) for x in counted(slices)]
    places = [*((values[v], axis) for v, axis in slices.given), *((x, 0) for x in numbers)]
    inputs = Inputs(
        [values[v] for v in slices.whole],
        [cuts.stacked(x, axis) for x, axis in places],
        [cuts.last(x, axis) for x, axis in places] if cuts.rest else [],
    )
    active = active_variables(slices.program, filter(_is_floating, slices.read), sums)
    varies = [v in active for v in sums]
    varying = active.intersection(sums)
    is_one_pass = len(varying) < 2 or not varying <= differentiated
    if not joined and is_one_pass and can_pair([v.aval for v in sums], inputs, program.eqns):
        avals, first = [v.aval for v in sums], None if loss is None else sums.index(results[loss])
        totals, pieces = sum_and_gradient(functions, inputs, avals, varies, first, scan), []
    else:
        totals, pieces = _loop(functions, inputs, sums, recompute, len(numbers), scan)
    found = dict(zip(sums, totals, strict=True))
    for v, (stacked, *last) in zip(joined, pieces, strict=True):
        axis = slices.axes[v]
        found[v] = jnp.concatenate([join(stacked, axis), *last], axis)
    return [found[v] for v in results]


class _Cuts:
    """Where an axis is cut: into equal chunks, and a shorter last one.

    Attributes:
        share: The share of the whole that a chunk is.
        rest: That of the last one; 0 if all are equal.
    """

    def __init__(self, slices: Slices, chunks: int) -> None:
        size, self._count, rest = sizes(slices.parts, chunks)
        self.share, self.rest = Fraction(size, slices.parts), Fraction(rest, slices.parts)

    def _length(self, x: Any, axis: int) -> int:
        return int(x.shape[axis] * self.share * self._count)

    def stacked(self, x: Any, axis: int) -> Any:
        """The equal chunks of an array, stacked in front."""
        if self.rest:
            x = jax.lax.slice_in_dim(x, 0, self._length(x, axis), axis=axis)
        return cut(x, axis, self._count)

    def last(self, x: Any, axis: int) -> Any:
        """The shorter last chunk."""
        return jax.lax.slice_in_dim(x, self._length(x, axis), x.shape[axis], axis=axis)


def _is_floating(v: Any) -> bool:
    return is_floating(v.aval)


def cut(x: jax.Array, axis: int, chunks: int) -> jax.Array:
    """Return the slices of an array along an axis, stacked in front."""
    shape = (*x.shape[:axis], chunks, x.shape[axis] // chunks, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def join(x: jax.Array, axis: int) -> jax.Array:
    """Return the array that stacked slices along an axis are cut from."""
    shape = x.shape[1:]
    whole = (*shape[:axis], x.shape[0] * shape[axis], *shape[axis + 1 :])
    return jnp.moveaxis(x, 0, axis).reshape(whole)


def _tied(counts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Counts that depend on what is given, for partial evaluation.

    What depends on counts alone, such as a mask, JAX would compute for all chunks in front of the
    loops around, and save.
    """
    ones = [
        jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim) for x in given if is_floating(x) and x.size
    ]
    return jax.lax.optimization_barrier([*counts, *ones])[: len(counts)]


def _loop(
    functions: Sequence[Any],
    inputs: Inputs,
    sums: Sequence[Any],
    recompute: bool,
    counts: int,
    scan: Scan,
) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """The sums, and of other results the stacked chunks and the last one."""
    dtypes = [x.dtype for x in inputs.whole]

    def body_of(one: Any) -> Any:
        def body(totals: Any, parts: list[Any], whole: list[Any]) -> tuple[list[Any], list[Any]]:
            as_given = [x.astype(dtype) if x.dtype != dtype else x
                        for x, dtype in zip(whole, dtypes, strict=True)]  # fmt: skip
            parts, numbers = parts[: len(parts) - counts], parts[len(parts) - counts :]
            if numbers:
                numbers = _tied(numbers, [*as_given, *parts])
            made = one(*as_given, *parts, *numbers)
            return added(totals, made[: len(sums)]), made[len(sums) :]

        return jax.checkpoint(body, prevent_cse=False) if recompute else body

    # The gradients of whole values are summed over chunks in the type that they have outside.
    whole = [x.astype(raised(x.dtype)) if is_floating(x) else x for x in inputs.whole]
    bodies = [body_of(one) for one in functions]
    start = zeros_for([v.aval for v in sums])
    totals, stacked = scan(bodies[0], start, inputs.parts, whole)
    pieces = [(x,) for x in stacked]
    if inputs.rest:
        totals, last = bodies[-1](totals, inputs.rest, whole)
        pieces = list(zip(stacked, last, strict=True))
    return [x.astype(v.aval.dtype) for x, v in zip(totals, sums, strict=True)], pieces
