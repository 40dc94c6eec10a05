"""Holding a value inside a region that is re-run.

A name and a policy are not enough: the derivative of `y = tanh(x)` reads tanh's own result, which
is not the named copy of it, so that tanh and what feeds it would be run again. Here the value goes
on with a derivative that reads the held copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._jaxpr import evaluate, inline_all, with_results_given
from jrc._tree import is_floating

Run = Callable[..., Sequence[Any]]
Name = Callable[[Any], Any]


def hold_results(run: Run, inputs: Sequence[Any], names: Sequence[Name]) -> list[Any]:
    """The results of one operator, each under its name; the derivative reads them as named."""

    def tangents(inputs: Any, values: Any, _: Any, moving: Sequence[int], moves: Any) -> Any:
        program = _tangent_program(run, inputs, moving, moves, len(values))
        return evaluate(program)(*inputs, *moves, *values)

    return _hold(run(*inputs), inputs, names, tangents)


def hold_relu(run: Run, inputs: Sequence[Any], names: Sequence[Name]) -> list[Any]:
    """As `hold_results` for max(x, 0), which is positive exactly where its argument is."""

    def tangents(_: Any, values: Any, __: Any, ___: Any, moves: Any) -> Any:
        return [jnp.where(values[0] > 0, moves[0], jnp.zeros_like(moves[0]))]

    return _hold(run(*inputs), inputs, names, tangents)


def hold_unit(
    run: Run, inputs: Sequence[Any], name: Name, is_held: Callable[[Any], bool]
) -> list[Any]:
    """The results of a function, held together with all that its derivative reads.

    Args:
        run: The function.
        inputs: Its inputs.
        name: Names a value that is to be held.
        is_held: Whether one of the inputs is held too, if the derivative reads it.
    """
    floats = [i for i, x in enumerate(inputs) if is_floating(x)]

    is_value: list[bool] = []

    def at(*moved: Any) -> tuple[list[Any], list[Any]]:
        results = run(*_merged(inputs, floats, moved))
        is_value[:] = map(is_floating, results)
        return _apart(results)

    values, derivative, rest = jax.linearize(at, *(inputs[i] for i in floats), has_aux=True)
    reads, structure = jax.tree.flatten(derivative)
    given = {id(x) for x in inputs if not is_held(x)}
    reads = [x if id(x) in given else name(x) for x in reads]

    def tangents(inputs: Any, _: Any, reads: Any, moving: Sequence[int], moves: Any) -> Any:
        linear = structure.unflatten(reads)
        zeros = [jnp.zeros_like(inputs[i]) for i in floats]
        at = [floats.index(i) for i in moving]
        # A linear function is its own derivative; what does not move is left out of that.
        return jax.jvp(lambda *ds: linear(*_merged(zeros, at, ds)), [zeros[i] for i in at], moves)[
            1
        ]

    held = iter(_through([name(x) for x in values], inputs, reads, tangents))
    others = iter([name(x) for x in rest])
    return [next(held if value else others) for value in is_value]


def _hold(
    results: Sequence[Any], inputs: Sequence[Any], names: Sequence[Name], tangents: Any
) -> list[Any]:
    named = [name(x) for name, x in zip(names, results, strict=True)]
    values, _ = _apart(named)
    moved = iter(_through(values, inputs, (), tangents))
    return [next(moved) if is_floating(x) else x for x in named]


def _through(
    values: Sequence[Any], inputs: Sequence[Any], reads: Sequence[Any], tangents: Any
) -> Sequence[Any]:
    """The values, with the derivative that `tangents` gives them.

    Their own derivative, which is still behind the name, is what a second one is made from.
    """

    @jax.custom_jvp
    def held_result(inputs: Any, values: Any, reads: Any) -> Any:
        return values

    def rule(primals: Any, moves: Any) -> Any:
        inputs, values, reads = primals
        still = jax.custom_derivatives.SymbolicZero
        moving = [
            i for i, (x, d) in enumerate(zip(inputs, moves[0], strict=True))
            if is_floating(x) and not isinstance(d, still)
        ]  # fmt: skip
        if not moving:
            return values, [jnp.zeros_like(x) for x in values]
        return values, list(tangents(inputs, values, reads, moving, [moves[0][i] for i in moving]))

    held_result.defjvp(rule, symbolic_zeros=True)
    return held_result(list(inputs), list(values), list(reads))


def reads_inputs(run: Run, inputs: Sequence[Any]) -> bool:
    """Whether the derivative reads anything but results that are given to it."""
    floats = [i for i, x in enumerate(inputs) if is_floating(x)]
    count = sum(map(is_floating, jax.eval_shape(run, *inputs)))
    moves = [inputs[i] for i in floats]
    program = _tangent_program(run, inputs, floats, moves, count)
    read = {id(atom) for eqn in program.eqns for atom in eqn.invars}
    return any(id(var) in read for var in program.invars[: len(inputs)])


def _tangent_program(
    run: Run, inputs: Sequence[Any], moving: Sequence[int], moves: Sequence[Any], count: int
) -> Any:
    """Tangents of the results, from inputs, their tangents, and the `count` floating results."""
    both = jax.make_jaxpr(lambda xs, ds: _jvp(run, xs, moving, ds))(list(inputs), list(moves))
    return with_results_given(inline_all(both), count)


def _jvp(run: Run, inputs: Sequence[Any], moving: Sequence[int], moves: Sequence[Any]) -> Any:
    """Floating results of `run`, and their tangents when these inputs move."""

    def at(*moved: Any) -> Any:
        return _apart(run(*_merged(inputs, moving, moved)))[0]

    return jax.jvp(at, [inputs[i] for i in moving], list(moves))


def _merged(inputs: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    merged = list(inputs)
    for i, x in zip(positions, new, strict=True):
        merged[i] = x
    return merged


def _apart(results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Those that have a derivative, and the others."""
    return [x for x in results if is_floating(x)], [x for x in results if not is_floating(x)]
