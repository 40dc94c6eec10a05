"""Trace a function of pytrees into a program of arrays.

>>> import jax.numpy as jnp
>>> traced = trace(lambda x: jnp.tanh(x) * 2, (jnp.ones(3),), {})
>>> [eqn.primitive.name for eqn in traced.program.eqns]
['tanh', 'mul']
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jrc._jaxpr.inline import inline_marked
from jrc._jaxpr.program import Program
from jrc._tree import Skeleton, split


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function's program, the inputs to run it on, and how to rebuild its result.

    Attributes:
        program: The program.
        inputs: Its inputs: first the arrays that the function closes over, which have gradients
            too, then the JAX arrays among the arguments.
        result: The tree of the function's result without its arrays.
        closed: The number of arrays that the function closes over.
    """

    program: Program
    inputs: tuple[Any, ...]
    result: Skeleton
    closed: int

    def run(self, call: Callable[..., Sequence[Any]]) -> Any:
        """Return the function's result, with `call` run instead of its program."""
        # A constant result of a program is a literal of JAX, which is no array.
        results = call(*self.inputs)
        return self.result.fill(
            [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]
        )


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    and_where: Callable[[JaxprEqn], bool] = lambda _: False,
) -> Traced:
    """Trace a function of pytrees; Python calls it once.

    Leaves that are no JAX arrays are passed as they are. Nested `jit` calls are inlined if they
    contain marks, or if `and_where` is true of them.
    """
    # As pairs, because JAX sorts the keys of a dict.
    leaves, skeleton = split((args, tuple(kwargs.items())))
    results = []

    def flat(*arrays: Any) -> list[Any]:
        new_args, new_kwargs = skeleton.fill(arrays)
        out, result = split(fn(*new_args, **dict(new_kwargs)))
        results.append(result)
        return out

    jaxpr = jax.make_jaxpr(flat)(*leaves)
    consts = tuple(jaxpr.consts)
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    program = Program(inline_marked(jaxpr, and_where))
    return Traced(program, (*consts, *leaves), results[-1], len(consts))
