"""Run a program with some of its intermediate values changed.

>>> import jax.numpy as jnp
>>> from jrc._jaxpr.trace import trace
>>> program = trace(lambda x: jnp.cos(jnp.sin(x)), (jnp.float32(0.5),), {}).program
>>> sine, cosine = (eqn.outvars[0] for eqn in program.eqns)
>>> (result,) = changed(program, {sine: lambda x: 0 * x})(jnp.float32(0.5))
>>> float(result)
1.0
"""

from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import Var

from jrc._jaxpr.program import INPUT, Program, evaluate


def changed(
    program: Program, changes: Mapping[Var, Callable[[Any], Any]]
) -> Callable[..., list[Any]]:
    """Return the program as a function of its inputs, with some values changed.

    Every equation that reads such a value reads the changed one. Dead equations do not run.
    """
    live = [p for p, is_live in enumerate(program.live()) if is_live]
    makers = sorted({program.producer[var] for var in changes} | {len(program.eqns)})
    starts = [INPUT, *makers]
    parts = [
        program.cut([p for p in live if start < p <= end])
        for start, end in zip(starts, makers, strict=False)
    ]

    def change(values: dict[Any, Any]) -> dict[Any, Any]:
        return {var: changes[var](x) if var in changes else x for var, x in values.items()}

    def run(*inputs: Any) -> list[Any]:
        values = change(dict(zip(program.jaxpr.invars, inputs, strict=True)))
        for part in parts:
            results = evaluate(part)(*(values[var] for var in part.invars))
            values |= change(dict(zip(part.outvars, results, strict=True)))
        return program.results(values)

    return run
