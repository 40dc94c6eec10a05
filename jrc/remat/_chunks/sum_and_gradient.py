"""A sum over chunks whose derivative is computed in the same loop.

The gradient of a chunk is computed beside its value, added to those before (whole inputs) or
stacked (inputs in slices), and multiplied by the tangents after the loop: nothing of a chunk
outlives it, and nothing runs again. It is a `custom_jvp` function, so that forward mode, reverse
mode and higher derivatives work.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jrc._jaxpr import (
    are_linear_rules,
    backward_regions_opened,
    evaluate,
    inner_programs,
    walk,
    zeros_of,
)
from jrc._tree import has_wide_range, is_floating, sum_dtype, varying_axes
from jrc.remat._chunks.steps import Scan


class Inputs(NamedTuple):
    """What chunks read.

    Attributes:
        whole: What each chunk reads whole.
        parts: What is cut: the slices of all equal chunks, stacked in front.
        rest: The slices of a shorter last chunk; nothing if there is none.
    """

    whole: list[Any]
    parts: list[Any]
    rest: list[Any] = []  # noqa: RUF012


def raised(dtype: Any) -> Any:
    """Return the type in which entries of a type are summed over chunks: float32 at least."""
    return sum_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def can_pair(avals: Sequence[Any], inputs: Inputs, eqns: Iterable[Any]) -> bool:
    """Return whether sums of these types may have their gradients in the pass of their values.

    Floating ones must be real scalars. The gradient of a chunk is computed before it is multiplied
    by the tangent, so that all that it is computed through must have the range of float32, and
    backward rules of a `custom_vjp` must be linear. Inside of a `shard_map` what is read must vary
    over the devices that the sums vary over: else its gradient is that of all devices.

    Args:
        avals: The types of the sums.
        inputs: What chunks read, or types of it.
        eqns: The equations that run in chunks.
    """
    eqns = list(eqns)
    sums = [aval for aval in avals if is_floating(aval)]
    are_scalars = not any(aval.shape for aval in sums)
    is_real = not any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in sums)
    axes = frozenset[str]().union(*map(varying_axes, sums))
    made = (v.aval for eqn in eqns for each in _with_inner(eqn) for v in each.outvars)
    return (
        are_scalars
        and is_real
        and all(map(has_wide_range, (*inputs.whole, *inputs.parts)))
        and all(map(has_wide_range, made))
        and all(varying_axes(x) >= axes for each in inputs for x in each if is_floating(x))
        and are_linear_rules(eqns)
    )


def _with_inner(eqn: Any) -> Iterator[Any]:
    """An equation, and those of the programs inside of it."""
    yield eqn
    for inner in inner_programs(eqn):
        yield from (each for each, _ in walk(inner))


def sum_and_gradient(
    functions: Sequence[Callable[..., Sequence[Any]]],
    inputs: Inputs,
    avals: Sequence[Any],
    varies: Sequence[bool],
    first: int | None,
    scan: Scan,
) -> list[Any]:
    """Return sums over chunks, scalars where they are floating.

    Args:
        functions: From whole inputs and one slice of the others to what the chunk adds to each sum:
            of an equal chunk, and of the last one where that is shorter.
        inputs: The inputs of all chunks.
        avals: The types of the sums.
        varies: Of each whether it is a differentiable function of the inputs.
        first: Which of them is the loss, if that is known: its pass makes the values of all, so
            that a pass of another whose gradient is not wanted is dead.
        scan: What runs the steps over equal chunks.
    """

    def lowered(totals: Sequence[Any]) -> list[Any]:
        return [x.astype(aval.dtype) for x, aval in zip(totals, avals, strict=True)]

    @jax.custom_jvp
    def loss_in_chunks(inputs: Inputs) -> list[Any]:
        def body(
            one: Any, totals: list[Any], parts: list[Any], whole: list[Any]
        ) -> tuple[list[Any], None]:
            return added(totals, one(*whole, *parts)), None

        return lowered(_over_chunks(body, functions, zeros_for(avals), inputs, scan)[0])

    def rule(primals: Any, tangents: Any) -> Any:
        (inputs,), (given,) = primals, tangents
        chosen = sorted((i for i, does in enumerate(varies) if does), key=lambda i: i != first)
        totals, gradients = _sums_and_gradients(functions, inputs, given, avals, chosen, scan)
        sums = lowered(totals)
        out = [zero_from_primal(x, True) for x in sums]
        for i, each in zip(chosen, gradients, strict=True):
            out[i] = _slope(each, given).astype(sums[i].dtype)
        return sums, out

    loss_in_chunks.defjvp(rule, symbolic_zeros=True)
    return loss_in_chunks(inputs)


def _over_chunks(
    body: Callable[[Any, Any, list[Any], list[Any]], tuple[Any, Any]],
    functions: Sequence[Any],
    start: Any,
    inputs: Inputs,
    scan: Scan,
) -> tuple[Any, Any, Any]:
    """What the steps over equal chunks carry and stack, and what the last one gives."""
    state, stacked = scan(functools.partial(body, functions[0]), start, inputs.parts, inputs.whole)
    if not inputs.rest:
        return state, stacked, None
    state, last = body(functions[-1], state, inputs.rest, inputs.whole)
    return state, stacked, last


def _sums_and_gradients(
    functions: Sequence[Callable[..., Sequence[Any]]],
    inputs: Inputs,
    tangents: Inputs,
    avals: Sequence[Any],
    differentiated: Sequence[int],
    scan: Scan,
) -> tuple[list[Any], list[Inputs]]:
    """The sums, and the gradients of those that are differentiated."""
    perturbed = Inputs(*([not isinstance(t, SymbolicZero) for t in each] for each in tangents))

    def body(one: Any, state: Any, parts: list[Any], given: list[Any]) -> Any:
        totals, sums = state

        def values(whole: list[Any], part: list[Any], i: int) -> tuple[Any, Any]:
            made = one(
                *filled(given, perturbed.whole, whole),
                *filled(parts, perturbed.parts, part),
            )
            return made[i], made

        def pulled_back(whole: list[Any], part: list[Any]) -> Any:
            made: Any = () if differentiated else one(*given, *parts)
            pulled = []
            for i in differentiated:  # each by itself: zero times an infinite slope is no number
                one_sum = functools.partial(values, i=i)
                value, pull, all_sums = jax.vjp(one_sum, whole, part, has_aux=True)
                made = made or all_sums
                pulled.append(pull(jnp.ones_like(value)))
            return made, pulled

        chosen = _chosen(given, perturbed.whole), _chosen(parts, perturbed.parts)
        made, pulled = _behind_barriers(pulled_back, *chosen)
        sums = [added(a, whole) for a, (whole, _) in zip(sums, pulled, strict=True)]
        return (added(totals, made), sums), [part for _, part in pulled]

    types = [jax.typeof(x) for x in _chosen(inputs.whole, perturbed.whole)]
    start = zeros_for(avals), [zeros_for(types) for _ in differentiated]
    (totals, sums), stacked, last = _over_chunks(body, functions, start, inputs, scan)
    last = [[] for _ in differentiated] if last is None else last
    return totals, [Inputs(*each) for each in zip(sums, stacked, last, strict=True)]


def _behind_barriers(run: Callable[..., Any], *inputs: Any) -> Any:
    """What a function returns; what its regions recompute stays apart from the first computation.

    JAX differentiates the rule that it is called in, and would drop the barriers of regions.
    """
    jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*inputs)
    opened = backward_regions_opened(jaxpr)
    return jax.tree.unflatten(
        jax.tree.structure(shapes), evaluate(opened)(*jax.tree.leaves(inputs))
    )


def _slope(gradients: Inputs, tangents: Inputs) -> Any:
    """The product of the gradients with the tangents of what is perturbed."""
    total = jnp.zeros(())
    for some, given in zip(gradients, tangents, strict=True):
        moved = [t for t in given if not isinstance(t, SymbolicZero)]
        for g, t in zip(some, moved, strict=True):
            total = total + jnp.real(jnp.sum(g * t))
    return total


def _chosen(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [x for x, flag in zip(values, flags, strict=True) if flag]


def filled(values: Sequence[Any], flags: Sequence[bool], new: Sequence[Any]) -> list[Any]:
    """Return the values, with new ones in the place of those that have the flag."""
    rest = iter(new)
    return [next(rest) if flag else x for x, flag in zip(values, flags, strict=True)]


def zeros_for(avals: Sequence[Any]) -> list[Any]:
    """Return zeros to which values of these types are added."""
    return [zeros_of(aval).astype(raised(aval.dtype)) for aval in avals]


def added(totals: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Return totals with more added to them, in the types that they have."""
    return [total + x.astype(total.dtype) for total, x in zip(totals, more, strict=True)]
