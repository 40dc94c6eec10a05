"""Which values of a program have a gradient: found by JAX's own backward pass, on shapes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrc._jaxpr import Program, changed, gate, zeros_of

RunGated = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class Gates(NamedTuple):
    """The values of one program at which a gradient is requested or stopped.

    Attributes:
        inputs: The inputs that are differentiated.
        probed: Intermediates whose gradient is requested.
        stopped: Values at which the gradient stops.
    """

    inputs: tuple[Any, ...]
    probed: tuple[Any, ...]
    stopped: frozenset[Any]


def gates_of(program: Program, wanted: Mapping[str, Any], stopped: frozenset[Any]) -> Gates:
    """Return the gates of a request: intermediates and stopped values need one, inputs do not."""
    given = set(program.jaxpr.invars)
    values = [
        var for var in dict.fromkeys(wanted.values()) if var not in stopped and _is_floating(var)
    ]
    inputs = tuple(var for var in values if var in given)
    probed = tuple(var for var in values if var not in given)
    return Gates(inputs, probed, frozenset(filter(_is_floating, stopped)))


def gated(
    program: Program,
    gates: Gates,
    given: Sequence[Any],
    watches: Mapping[Any, Callable[[Any], Any]] | None = None,
) -> RunGated:
    """Return the program as a function of the differentiated inputs and of the probes.

    Args:
        program: The program.
        gates: Where to differentiate and stop.
        given: All inputs of the program.
        watches: Identities to put on values before their gates.

    Returns:
        A function of two lists, arrays for `gates.inputs` and arrays like `gates.probed`.
    """
    watches = watches or {}

    def run(inputs: Sequence[Any], probes: Sequence[Any]) -> list[Any]:
        new = dict(zip(gates.inputs, inputs, strict=True))
        probe = dict(zip(gates.probed, probes, strict=True))

        def change(var: Any) -> Callable[[Any], Any]:
            stop = var in gates.stopped
            closed = (lambda x: gate(x, probe.get(var), stop=stop)) if needs_gate(var) else _same
            return lambda x: closed(watches.get(var, _same)(x))

        needs_gate = {*gates.probed, *gates.stopped}.__contains__
        changes = {var: change(var) for var in {*gates.probed, *gates.stopped, *watches}}
        values = zip(program.jaxpr.invars, given, strict=True)
        return changed(program, changes)(*(new.get(var, x) for var, x in values))

    return run


def probes_of(gates: Gates) -> list[Any]:
    """Return zeros for the probes, each typed like its value."""
    return [zeros_of(var.aval) for var in gates.probed]


def receivers(
    program: Program, gates: Gates, given: Sequence[Any], everywhere: bool
) -> frozenset[Any]:
    """Return the values that have a gradient: all of them, or only inputs and probed ones.

    Each value goes through an identity with a derivative rule of its own, which JAX calls if its
    backward pass reaches the value. A symbolically zero cotangent does not reach it. The loss is
    the program's first result.
    """
    seen: set[Any] = set()
    watched = [*gates.inputs, *(_values(program) if everywhere else ())]
    watches = {var: _watch(var, seen) for var in watched if var not in gates.stopped}

    def run(inputs: Sequence[Any], probes: Sequence[Any]) -> Any:
        probes = [_watch(("probe", v), seen)(x) for v, x in zip(gates.probed, probes, strict=True)]
        return jnp.sum(gated(program, gates, given, watches)(inputs, probes)[0])

    at_inputs = dict(zip(program.jaxpr.invars, given, strict=True))
    jax.eval_shape(jax.grad(run, (0, 1)), [at_inputs[v] for v in gates.inputs], probes_of(gates))
    return frozenset(seen)


def is_reached(var: Any, seen: Collection[Any]) -> bool:
    """Whether a requested value has a gradient."""
    return var in seen or ("probe", var) in seen


def _values(program: Program) -> list[Any]:
    made = [var for eqn in program.eqns for var in eqn.outvars]
    return [var for var in (*program.jaxpr.invars, *made) if _is_floating(var)]


def _watch(key: Any, seen: set[Any]) -> Callable[[Any], Any]:
    @jax.custom_vjp
    def watch(x: Any) -> Any:
        return x

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        seen.add(key)
        return (cotangent,)

    watch.defvjp(lambda x: (x, None), backward)
    return watch


def _same(x: Any) -> Any:
    return x


def _is_floating(var: Any) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", jnp.int32), jnp.inexact)
