"""What the derivative of a function reads, found by asking JAX for its tangent program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._jaxpr import inline_all, with_results_given
from jrc._tree import is_floating

Run = Callable[..., Sequence[Any]]


def reads_inputs(run: Run, inputs: Sequence[Any]) -> bool:
    """Return whether the derivative reads inputs even where the results are given."""
    floats = [i for i, x in enumerate(inputs) if is_floating(x)]
    return bool(derivative_reads(run, inputs, floats)[0])


def derivative_reads(
    run: Run, inputs: Sequence[Any], perturbed: Sequence[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the inputs and the results that the derivative reads when some inputs are perturbed.

    A result that can be read instead of the inputs it was computed from counts as a result.

    Args:
        run: A function of arrays that returns a sequence of arrays.
        inputs: Its inputs.
        perturbed: Positions of the inputs that are perturbed.

    Returns:
        Positions of the inputs, and positions of the results.
    """
    count = len(jax.eval_shape(run, *inputs))
    program = tangent_program(run, inputs, perturbed, [inputs[i] for i in perturbed], count)
    read = {id(atom) for eqn in program.eqns for atom in eqn.invars}
    flags = [id(var) in read for var in program.invars]
    results = flags[len(flags) - count :]
    return (
        frozenset(i for i, flag in enumerate(flags[: len(inputs)]) if flag),
        frozenset(i for i, flag in enumerate(results) if flag),
    )


def tangent_program(
    run: Run, inputs: Sequence[Any], perturbed: Sequence[int], tangents: Sequence[Any], count: int
) -> Any:
    """Return the program of the tangents of the floating results.

    Its inputs are the inputs of `run`, the tangents of the perturbed ones, and all `count` results
    of `run`, which it does not recompute.
    """
    both = jax.make_jaxpr(lambda xs, ds: _jvp(run, xs, perturbed, ds))(list(inputs), list(tangents))
    return with_results_given(inline_all(both), count)


def _jvp(run: Run, inputs: Sequence[Any], perturbed: Sequence[int], tangents: Sequence[Any]) -> Any:
    """All results of `run`, and the tangents of the floating ones."""
    is_value: list[bool] = []

    def of_perturbed(*new: Any) -> Any:
        results = run(*replaced(inputs, perturbed, new))
        is_value[:] = map(is_floating, results)
        return split_floating(results)

    primals = [inputs[i] for i in perturbed]
    values, result_tangents, rest = jax.jvp(of_perturbed, primals, list(tangents), has_aux=True)
    return join_floating(is_value, values, rest), result_tangents


def replaced(inputs: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return the inputs with those at some positions replaced."""
    inputs = list(inputs)
    for i, x in zip(positions, new, strict=True):
        inputs[i] = x
    return inputs


def split_floating(results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the results that have a derivative, and the others."""
    return [x for x in results if is_floating(x)], [x for x in results if not is_floating(x)]


def join_floating(
    is_value: Sequence[bool], values: Sequence[Any], rest: Sequence[Any]
) -> list[Any]:
    """Return in order what `split_floating` split."""
    floating, others = iter(values), iter(rest)
    return [next(floating if value else others) for value in is_value]
