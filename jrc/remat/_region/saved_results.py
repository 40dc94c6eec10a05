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


def save_results(run: Run, inputs: Sequence[Any], names: Sequence[Name]) -> list[Any]:
    """The results of one operator, each under its name; the derivative reads them as named."""
    names_in = [name(x) for name, x in zip(names, run(*inputs), strict=True)]
    values, others = _apart(names_in)
    count, is_value = len(names_in), [is_floating(x) for x in names_in]

    # The rule outlives the trace: it takes no tracer along, as `named` would be.
    def tangents(
        inputs: Any, values: Any, others: Any, perturbed: Sequence[int], moves: Any
    ) -> Any:
        program = _tangent_program(run, inputs, perturbed, moves, count)
        known = _together(is_value, values, others)
        return evaluate(program)(*inputs, *moves, *known)

    return _together(is_value, _through(values, inputs, others, tangents), others)


def save_function(
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

    def tangents(inputs: Any, _: Any, reads: Any, perturbed: Sequence[int], moves: Any) -> Any:
        linear = structure.unflatten(reads)
        zeros = [jnp.zeros_like(inputs[i]) for i in floats]
        at = [floats.index(i) for i in perturbed]
        # A linear function is its own derivative; what does not move is left out of that.
        return jax.jvp(lambda *ds: linear(*_merged(zeros, at, ds)), [zeros[i] for i in at], moves)[
            1
        ]

    values = _through([name(x) for x in values], inputs, reads, tangents)
    return _together(is_value, values, [name(x) for x in rest])


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
        perturbed = [
            i for i, (x, d) in enumerate(zip(inputs, moves[0], strict=True))
            if is_floating(x) and not isinstance(d, still)
        ]  # fmt: skip
        if not perturbed:
            return values, [jnp.zeros_like(x) for x in values]
        return values, list(
            tangents(inputs, values, reads, perturbed, [moves[0][i] for i in perturbed])
        )

    held_result.defjvp(rule, symbolic_zeros=True)
    return held_result(list(inputs), list(values), list(reads))


def is_differentiable_twice(run: Run, inputs: Sequence[Any]) -> bool:
    """Whether what the derivative reads has a derivative, which a held value takes along."""
    floats = [i for i, x in enumerate(inputs) if is_floating(x)]

    def reads(*moved: Any) -> list[Any]:
        at = lambda *moved: _apart(run(*_merged(inputs, floats, moved)))  # noqa: E731
        derivative = jax.linearize(at, *moved, has_aux=True)[1]
        return [x for x in jax.tree.leaves(derivative) if is_floating(x)]

    moved = [inputs[i] for i in floats]
    try:
        jax.eval_shape(lambda *moved: jax.jvp(reads, moved, moved), *moved)
    except (NotImplementedError, TypeError, ValueError):
        return False
    return True


def reads_inputs(run: Run, inputs: Sequence[Any]) -> bool:
    """Whether the derivative reads anything but results that are given to it."""
    return bool(
        derivative_reads(run, inputs, [i for i, x in enumerate(inputs) if is_floating(x)])[0]
    )


def derivative_reads(
    run: Run, inputs: Sequence[Any], perturbed: Sequence[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Which inputs and which results the derivative reads when these inputs move.

    A result that is read in the place of what it was made from counts as a result.
    """
    count = len(jax.eval_shape(run, *inputs))
    program = _tangent_program(run, inputs, perturbed, [inputs[i] for i in perturbed], count)
    read = {id(atom) for eqn in program.eqns for atom in eqn.invars}
    flags = [id(var) in read for var in program.invars]
    results = flags[len(flags) - count :]
    return (
        frozenset(i for i, flag in enumerate(flags[: len(inputs)]) if flag),
        frozenset(i for i, flag in enumerate(results) if flag),
    )


def _tangent_program(
    run: Run, inputs: Sequence[Any], perturbed: Sequence[int], moves: Sequence[Any], count: int
) -> Any:
    """Tangents of the floating results, from inputs, their tangents, and all `count` results."""
    both = jax.make_jaxpr(lambda xs, ds: _jvp(run, xs, perturbed, ds))(list(inputs), list(moves))
    return with_results_given(inline_all(both), count)


def _jvp(run: Run, inputs: Sequence[Any], perturbed: Sequence[int], moves: Sequence[Any]) -> Any:
    """All results of `run`, and the tangents of the floating ones when these inputs move."""
    is_value: list[bool] = []

    def at(*moved: Any) -> Any:
        results = run(*_merged(inputs, perturbed, moved))
        is_value[:] = map(is_floating, results)
        return _apart(results)

    values, tangents, rest = jax.jvp(at, [inputs[i] for i in perturbed], list(moves), has_aux=True)
    return _together(is_value, values, rest), tangents


def _merged(inputs: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    merged = list(inputs)
    for i, x in zip(positions, new, strict=True):
        merged[i] = x
    return merged


def _apart(results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Those that have a derivative, and the others."""
    return [x for x in results if is_floating(x)], [x for x in results if not is_floating(x)]


def _together(is_value: Sequence[bool], values: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    """What `_apart` took apart, in order."""
    known, others = iter(values), iter(rest)
    return [next(known if value else others) for value in is_value]
