"""Residuals: what the derivative of a function saves besides its inputs. JAX is asked."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._jaxpr import (
    Program,
    inline_all,
    inner_programs,
    is_variable,
    loop_parts,
    nbytes,
    primitive_name,
    repeats,
)

Stacked = tuple[Any, int]
"""The type of what steps of a loop write into a stack, and how many steps do."""


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the derivative of a function saves besides its inputs.

    Attributes:
        jaxpr: The program whose results are all that the derivative saves.
        variables: Those results that are no inputs.
    """

    jaxpr: Any
    variables: frozenset[Any]

    @property
    def bytes(self) -> int:
        """Bytes of the residuals."""
        return sum(nbytes(x.aval) for x in self.variables)

    @property
    def stacked(self) -> list[Stacked]:
        """What steps of loops write of them."""
        return list(stacked_by_loops(self.jaxpr, self.variables))

    def inlined(self) -> tuple[Program, list[Any]]:
        """Return the program without `jit` calls, and the residuals in it."""
        program = Program(inline_all(self.jaxpr))
        pairs = zip(program.jaxpr.outvars, self.jaxpr.outvars, strict=True)
        return program, [x for x, old in pairs if is_variable(old) and old in self.variables]


def stacked_by_loops(jaxpr: Any, values: Iterable[Any], times: int = 1) -> Iterator[Stacked]:
    """Yield what steps of loops write of some values, each where it is made first.

    An inner loop's stack that an outer loop stacks again counts in the inner loop.

    Args:
        jaxpr: The program that makes the values.
        values: Variables of it.
        times: How often it runs.
    """
    makers = {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}
    for v in filter(is_variable, values):
        eqn, i = makers.get(v, (None, 0))
        if eqn is None or primitive_name(eqn) == "while":
            continue
        steps, is_loop = times * repeats(eqn), primitive_name(eqn) == "scan"
        if is_loop and i < loop_parts(eqn)[1]:
            continue
        # Each branch of a `cond` returns what one of them saves.
        for inner in inner_programs(eqn):
            made = inner.outvars[i : i + 1]
            found = list(stacked_by_loops(inner, made, steps))
            if is_loop and not found and repeats(eqn) > 1:
                found = [(x.aval, steps) for x in made]
            if found:
                yield from found
                break


def saved_by(backward: Any) -> list[Any]:
    """Return the arrays that a backward function of `jax.vjp` holds.

    A `jax.Ref` that a region writes to again is no value that is saved.
    """
    return [x for x in jax.tree.leaves(backward) if not isinstance(x, jax.Ref)]


def residuals_of(
    run: Callable[..., Any],
    avals: Sequence[Any],
    perturbed: Sequence[int],
    with_results: bool = False,
) -> Residuals:
    """Return the residuals of a function.

    Args:
        run: A function of arrays that returns arrays.
        avals: The types of its inputs.
        perturbed: The inputs that it is differentiated by.
        with_results: Whether its results count as well, those that are residuals once.
    """

    def saved(*inputs: Any) -> Any:
        def at(*primals: Any) -> Any:
            new = dict(zip(perturbed, primals, strict=True))
            return list(run(*(new.get(i, x) for i, x in enumerate(inputs))))

        results, backward = jax.vjp(at, *(inputs[i] for i in perturbed))
        return [*saved_by(backward), *(results if with_results else ())]

    return _residuals(jax.make_jaxpr(saved)(*avals))


def residuals_and_gradient(
    run: Callable[..., Any], avals: Sequence[Any], perturbed: Sequence[int]
) -> tuple[Residuals, Any]:
    """Return the residuals of a loss, and the program of the loss and its gradients.

    Both come from one trace: in a deep program a second one takes a second.

    Args:
        run: A function of arrays that returns a list: the scalar loss, and further arrays.
        avals: The types of its inputs.
        perturbed: The inputs that it is differentiated by.
    """
    count = 0

    def both(*inputs: Any) -> list[Any]:
        nonlocal count

        def at(*primals: Any) -> Any:
            new = dict(zip(perturbed, primals, strict=True))
            value, *more = run(*(new.get(i, x) for i, x in enumerate(inputs)))
            return value, more

        primals = [inputs[i] for i in perturbed]
        value, backward, more = jax.vjp(at, *primals, has_aux=True)
        saved = saved_by(backward)
        count = len(saved)
        return [*saved, value, *more, *backward(jnp.ones_like(value))]

    jaxpr = jax.make_jaxpr(both)(*avals)
    saved = set(filter(is_variable, jaxpr.outvars[:count]))
    last = max((k for k, eqn in enumerate(jaxpr.eqns) if saved & {*eqn.outvars}), default=-1)
    forward = jaxpr.replace(eqns=jaxpr.eqns[: last + 1], outvars=jaxpr.outvars[:count])
    return _residuals(forward), jaxpr.replace(outvars=jaxpr.outvars[count:])


def _residuals(jaxpr: Any) -> Residuals:
    given = {*jaxpr.constvars, *jaxpr.invars}
    made = (x for x in jaxpr.outvars if is_variable(x) and x not in given)
    return Residuals(jaxpr, frozenset(made))
