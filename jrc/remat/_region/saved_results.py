"""Saving a value inside a recomputed region.

A name and a policy do not suffice: the derivative of `y = tanh(x)` reads tanh's own result, and
not the named copy of it, so that tanh and its operand would be recomputed. The functions here
return the value with a derivative that reads the named copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._jaxpr import evaluate
from jrc._tree import is_floating
from jrc.remat._region.derivative_reads import (
    join_floating,
    replaced,
    split_floating,
    tangent_program,
)

Run = Callable[..., Sequence[Any]]
Name = Callable[[Any], Any]


def save_results(run: Run, inputs: Sequence[Any], names: Sequence[Name]) -> list[Any]:
    """Return the results of one operator, each named; the derivative reads the named results.

    Args:
        run: The operator as a function of its inputs.
        inputs: Its inputs.
        names: For each result the function that names it.
    """
    named = [name(x) for name, x in zip(names, run(*inputs), strict=True)]
    values, others = split_floating(named)
    count, is_value = len(named), [is_floating(x) for x in named]

    # The rule outlives the trace: it must close over no tracer, such as `named`.
    def tangents_of(
        inputs: Any, values: Any, others: Any, perturbed: Sequence[int], tangents: Any
    ) -> Any:
        program = tangent_program(run, inputs, perturbed, tangents, count)
        results = join_floating(is_value, values, others)
        return evaluate(program)(*inputs, *tangents, *results)

    return join_floating(is_value, _with_derivative(values, inputs, others, tangents_of), others)


def save_function(
    run: Run, inputs: Sequence[Any], name: Name, is_saved: Callable[[Any], bool]
) -> list[Any]:
    """Return the results of a function, saved together with all that its derivative reads.

    Args:
        run: The function.
        inputs: Its inputs.
        name: Names a value that is to be saved.
        is_saved: Whether an input that the derivative reads is to be saved too.
    """
    floats = [i for i, x in enumerate(inputs) if is_floating(x)]
    is_value: list[bool] = []

    def of_floats(*new: Any) -> tuple[list[Any], list[Any]]:
        results = run(*replaced(inputs, floats, new))
        is_value[:] = map(is_floating, results)
        return split_floating(results)

    primals = [inputs[i] for i in floats]
    values, derivative, rest = jax.linearize(of_floats, *primals, has_aux=True)
    reads, structure = jax.tree.flatten(derivative)
    unsaved = {id(x) for x in inputs if not is_saved(x)}
    reads = [x if id(x) in unsaved else name(x) for x in reads]

    def tangents_of(
        inputs: Any, _: Any, reads: Any, perturbed: Sequence[int], tangents: Any
    ) -> Any:
        linear = structure.unflatten(reads)
        zeros = [jnp.zeros_like(inputs[i]) for i in floats]
        places = [floats.index(i) for i in perturbed]
        # A linear function is its own derivative. With `jvp` inputs that are not perturbed take
        # no part in it.
        of_perturbed = lambda *new: linear(*replaced(zeros, places, new))  # noqa: E731
        return jax.jvp(of_perturbed, [zeros[i] for i in places], tangents)[1]

    values = _with_derivative([name(x) for x in values], inputs, reads, tangents_of)
    return join_floating(is_value, values, [name(x) for x in rest])


def _with_derivative(
    values: Sequence[Any], inputs: Sequence[Any], reads: Sequence[Any], tangents_of: Any
) -> Sequence[Any]:
    """The values, with the derivative that `tangents_of` computes.

    The values' own derivative is still there behind the name: a second derivative uses it.
    """

    @jax.custom_jvp
    def held_result(inputs: Any, values: Any, reads: Any) -> Any:
        return values

    def rule(primals: Any, tangents: Any) -> Any:
        inputs, values, reads = primals
        zero = jax.custom_derivatives.SymbolicZero
        perturbed = [
            i for i, (x, d) in enumerate(zip(inputs, tangents[0], strict=True))
            if is_floating(x) and not isinstance(d, zero)
        ]  # fmt: skip
        if not perturbed:
            return values, [jnp.zeros_like(x) for x in values]
        of_perturbed = [tangents[0][i] for i in perturbed]
        return values, list(tangents_of(inputs, values, reads, perturbed, of_perturbed))

    held_result.defjvp(rule, symbolic_zeros=True)
    return held_result(list(inputs), list(values), list(reads))


def is_differentiable_twice(run: Run, inputs: Sequence[Any]) -> bool:
    """Return whether the values that the derivative reads have a derivative themselves."""
    floats = [i for i, x in enumerate(inputs) if is_floating(x)]

    def reads(*new: Any) -> list[Any]:
        of_floats = lambda *new: split_floating(run(*replaced(inputs, floats, new)))  # noqa: E731
        derivative = jax.linearize(of_floats, *new, has_aux=True)[1]
        return [x for x in jax.tree.leaves(derivative) if is_floating(x)]

    primals = [inputs[i] for i in floats]
    try:
        jax.eval_shape(lambda *new: jax.jvp(reads, new, new), *primals)
    except (NotImplementedError, TypeError, ValueError):
        return False
    return True
