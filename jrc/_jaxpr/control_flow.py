"""Running an equation with other programs inside: loops, branches and `shard_map` bodies.

>>> import jax.numpy as jnp
>>> from jrc._jaxpr.program import evaluate
>>> sums = lambda xs: jax.lax.scan(lambda c, x: (c + x, c), 0.0, xs)
>>> (eqn,) = jax.make_jaxpr(sums)(jnp.ones(3)).eqns
>>> [float(x) for x in rebuild(eqn, evaluate)(0.0, jnp.ones(3))[:1]]
[3.0]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun

from jrc._jaxpr.equations import inner_programs, region_around
from jrc._jaxpr.inline import splice
from jrc._jaxpr.primitives import facts_of

Run = Callable[..., Sequence[Any]]


def can_rebuild(eqn: JaxprEqn) -> bool:
    """Return whether `rebuild` takes this construct; custom derivatives and regions it does not."""
    return eqn.primitive.name == "scan" or eqn.primitive.name in _FORMS


def rebuild(
    eqn: JaxprEqn, run: Callable[[Jaxpr], Run], loop: Callable[..., Any] = jax.lax.scan
) -> Run:
    """Return the equation as a function of its inputs, with other programs inside.

    Args:
        eqn: An equation for which `can_rebuild` is true.
        run: From a program inside to the function that runs in its place.
        loop: Runs a `scan`; takes the arguments of `jax.lax.scan`.
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
    """Return how many constants and carries a `scan` has; they come first among its inputs."""
    body = eqn.params["jaxpr"]
    # A carry has the same rank outside; a sliced or stacked value has one axis more outside.
    carried = _same_rank(eqn.outvars, body.outvars)
    return _same_rank(eqn.invars, body.invars) - carried, carried


def is_unrolled(eqn: JaxprEqn) -> bool:
    """Return whether a `scan` writes several steps in one iteration of its loop."""
    return eqn.primitive.name == "scan" and eqn.params["unroll"] != 1


def replaceable_programs(eqn: JaxprEqn) -> tuple[Jaxpr, ...]:
    """Return the programs inside of an equation that `with_programs` replaces.

    They are the body of a `scan`, the branches of a `cond`, in order, and what a `jax.checkpoint`
    region computes.
    """
    is_known = facts_of(eqn).is_region or eqn.primitive.name in ("scan", "cond")
    return inner_programs(eqn) if is_known else ()


def with_programs(eqn: JaxprEqn, new: Mapping[int, Jaxpr]) -> JaxprEqn:
    """Return an equation with some of its `replaceable_programs` replaced, by their numbers.

    Each has the inputs and results of that which it takes the place of.
    """
    programs = tuple(new.get(i, each) for i, each in enumerate(replaceable_programs(eqn)))
    if eqn.primitive.name == "cond":
        return eqn.replace(params=eqn.params | {"branches": programs})
    if "jaxpr" in eqn.params:
        return eqn.replace(params=eqn.params | {"jaxpr": programs[0]})
    # A region that `jax_remat3` wraps: its types are not only in the program.
    region = region_around(eqn, jaxpr_as_fun(programs[0]))
    return _traced_again(eqn, region)


def _traced_again(eqn: JaxprEqn, run: Run) -> JaxprEqn:
    """Return the one equation of a function, in the place of another one."""
    new = jax.make_jaxpr(run)(*(x.aval for x in eqn.invars))
    (made,), _ = splice(new, eqn.invars)
    return made.replace(outvars=eqn.outvars, source_info=eqn.source_info)


def inputs_of_programs(eqn: JaxprEqn) -> list[Any]:
    """Return the operands that are the inputs of an equation's `replaceable_programs`."""
    return eqn.invars[1:] if eqn.primitive.name == "cond" else eqn.invars


def mesh_of_shard_map(eqn: JaxprEqn) -> Any:
    """Return the mesh of a `shard_map`, `None` for any other equation."""
    return eqn.params["mesh"] if eqn.primitive.name == "shard_map" else None


def is_manual(eqn: JaxprEqn) -> bool:
    """Return whether a `shard_map` leaves no axis of its mesh to XLA."""
    mesh, names = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    return all(mesh.shape[name] == 1 for name in (*mesh.auto_axes, *mesh.explicit_axes)
               if name not in names)  # fmt: skip


def with_mapped_program(eqn: JaxprEqn, run: Callable[[Jaxpr], Run]) -> JaxprEqn:
    """Return a `shard_map` with another program for each device, of the same inputs and results.

    Args:
        eqn: The `shard_map`.
        run: From the jaxpr that each device runs to what runs in its place. It is called while
            the axes of the mesh have names, which collectives need.
    """
    mapped = _shard_map(eqn, lambda jaxpr: lambda *shards: run(jaxpr)(*shards))
    return _traced_again(eqn, mapped)


def in_shard_map[T](eqn: JaxprEqn, visit: Callable[[Jaxpr], T]) -> T:
    """Return what `visit` makes of the jaxpr that each device of a `shard_map` runs.

    It is called while the axes of the mesh have names, as they do in a trace alone: so the
    `shard_map` is traced once more, and what comes of that is dropped.
    """
    found: list[T] = []

    def run(jaxpr: Jaxpr) -> Run:
        found.append(visit(jaxpr))
        return jaxpr_as_fun(jaxpr)

    with_mapped_program(eqn, run)
    return found[0]


def _same_rank(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))


def _cond(eqn: JaxprEqn, run: Callable[[Jaxpr], Run]) -> Run:
    branches = [run(branch) for branch in eqn.params["branches"]]
    if eqn.params.get("branches_platforms"):
        return _platform_dependent(eqn, branches)
    return lambda index, *args: jax.lax.switch(
        index, [lambda *a, branch=branch: list(branch(*a)) for branch in branches], *args
    )


def _platform_dependent(eqn: JaxprEqn, branches: Sequence[Run]) -> Run:
    """A `cond` that keeps the platform of each branch, which `lax.switch` does not take.

    Without it a branch would be compiled for a platform that it is not written for.
    """

    def call(index: Any, *args: Any) -> Sequence[Any]:
        programs = [jax.make_jaxpr(lambda *a, b=branch: list(b(*a)))(*args) for branch in branches]
        params = eqn.params | {"branches": tuple(programs)}
        return eqn.primitive.bind(index, *args, **params)

    return call


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
