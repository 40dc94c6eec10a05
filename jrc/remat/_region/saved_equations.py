"""Saving the results of one equation, or of one tagged call, inside a recomputed region."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jrc._jaxpr import Reads, can_rebuild, facts_of, inner_program, inner_programs, walk
from jrc.remat._region.derivative_reads import reads_inputs
from jrc.remat._region.saved_results import (
    is_differentiable_twice,
    save_function,
    save_results,
)

Run = Callable[..., Sequence[Any]]
Name = Callable[[Any], Any]


def save_equation(eqn: Any, run: Run, inputs: Sequence[Any], names: Sequence[Name]) -> list[Any]:
    """Return the results of an equation, each named.

    Args:
        eqn: The equation.
        run: The equation as a function of its inputs.
        inputs: Its inputs.
        names: For each result the function that names it.
    """
    reads_results = bool(facts_of(eqn).derivative_reads & Reads.RESULT)
    if _reads_inside(eqn) or not reads_results or not eqn.invars:
        return [name(x) for name, x in zip(names, run(*inputs), strict=True)]
    return save_results(run, inputs, names)


def save_call(
    eqn: Any, run: Run, inputs: Sequence[Any], name: Name, given: Collection[int]
) -> list[Any]:
    """Return the results of a call that is saved whole, with the values its derivative reads.

    Args:
        eqn: The call.
        run: The call as a function of its inputs.
        inputs: Its inputs.
        name: Names a value that is saved.
        given: The identities of inputs that are saved already.
    """
    if is_closed(eqn) or not is_differentiable_twice(run, inputs):
        return [name(x) for x in run(*inputs)]
    if any(facts_of(each).is_contraction for each, _ in walk(inner_program(eqn))):
        # The derivative of a product reads its operands: they are not saved for it.
        return save_function(run, inputs, name, lambda _: False)
    if not reads_inputs(run, inputs):
        return save_results(run, inputs, [name] * len(eqn.outvars))
    return save_function(run, inputs, name, lambda x: id(x) not in given)


def is_closed(eqn: Any) -> bool:
    """Return whether no derivative can be put around the derivative of this equation.

    A `custom_vjp` has no `jvp`, and the `jvp` of a `cond` has no transpose once it is batched.
    """
    inner = (each for jaxpr in inner_programs(eqn) for each, _ in walk(jaxpr))
    return any(facts_of(each).is_closed for each in (eqn, *inner))


def _reads_inside(eqn: Any) -> bool:
    """Whether a derivative reads values inside, whatever is known of the results."""
    return (can_rebuild(eqn) and eqn.primitive.name != "jit") or is_closed(eqn)
