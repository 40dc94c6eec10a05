"""Running an equation with other programs inside: loops, branches and `shard_map` bodies."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

Run = Callable[..., Sequence[Any]]


def can_rebuild(eqn: JaxprEqn) -> bool:
    """Whether `rebuild` knows this construct; rules of derivatives and regions stay closed."""
    return eqn.primitive.name == "scan" or eqn.primitive.name in _FORMS


def rebuild(
    eqn: JaxprEqn, run: Callable[[Jaxpr], Run], loop: Callable[..., Any] = jax.lax.scan
) -> Run:
    """The equation as a function of its inputs, each inner program replaced by `run` of it.

    A `scan` is run by `loop`.
    """
    if eqn.primitive.name == "scan":
        return _scan(eqn, run, loop)
    return _FORMS[eqn.primitive.name](eqn, run)


def _scan(eqn: JaxprEqn, run: Callable[[Jaxpr], Run], loop: Callable[..., Any]) -> Run:
    params, body = eqn.params, eqn.params["jaxpr"]
    inner = run(body)
    consts, carried = loop_parts(eqn)
    end = consts + carried

    def call(*args: Any) -> list[Any]:
        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            results = list(inner(*args[:consts], *carry, *xs))
            return results[:carried], results[carried:]

        carry, ys = loop(
            body,
            list(args[consts:end]),
            list(args[end:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]

    return call


def loop_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many constants and carries a `scan` has; they come first among its inputs."""
    body = eqn.params["jaxpr"]
    # What goes around keeps its rank; what is sliced or stacked has one axis more outside.
    carried = _same_rank(eqn.outvars, body.outvars)
    return _same_rank(eqn.invars, body.invars) - carried, carried


def _same_rank(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))


def _cond(eqn: JaxprEqn, run: Callable[[Jaxpr], Run]) -> Run:
    branches = [run(branch) for branch in eqn.params["branches"]]
    return lambda index, *args: jax.lax.switch(
        index, [lambda *a, branch=branch: list(branch(*a)) for branch in branches], *args
    )


def _shard_map(eqn: JaxprEqn, run: Callable[[Jaxpr], Run]) -> Run:
    params = eqn.params
    inner = run(params["jaxpr"])

    def call(*args: Any) -> Any:
        return jax.shard_map(
            lambda *shards: tuple(inner(*shards)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=params["newly_manual_axes"],
            check_vma=params["check_vma"],
        )(*args)

    return call


def _jit(eqn: JaxprEqn, run: Callable[[Jaxpr], Run]) -> Run:
    return run(eqn.params["jaxpr"])


_FORMS: dict[str, Callable[[JaxprEqn, Callable[[Jaxpr], Run]], Run]] = {
    "cond": _cond,
    "shard_map": _shard_map,
    "jit": _jit,
}
