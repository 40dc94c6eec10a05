"""The program of one slice: equations of a program, on values of which one axis is shorter.

>>> import jax, jax.numpy as jnp
>>> from jrc._jaxpr.independent_axes import independent_axes
>>> from jrc._jaxpr.slices import sliced
>>> program = Program(jax.make_jaxpr(lambda x: jnp.tanh(x).reshape(6, 8))(jnp.ones((6, 2, 4))))
>>> slices = sliced(program, {program.jaxpr.invars[0]: 0}, independent_axes)
>>> third = slice_program(slices, Fraction(1, 3), program.jaxpr.outvars)
>>> [eqn.outvars[0].aval.shape for eqn in third.eqns]
[(2, 2, 4), (2, 8)]
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jrc._jaxpr.atoms import abstract, is_variable, shape_of
from jrc._jaxpr.axes import is_convolution
from jrc._jaxpr.axis_rules import IndependentAxis
from jrc._jaxpr.control_flow import loop_parts
from jrc._jaxpr.custom_derivatives import (
    cotangents_of,
    floating_positions,
    split_at_cotangents,
    tangents_of,
)
from jrc._jaxpr.equations import call_name, inner_program, inner_programs, region_around
from jrc._jaxpr.independent_axes import independent_axes
from jrc._jaxpr.inline import inline_all, splice
from jrc._jaxpr.linear_solve import solver_programs, with_solver_programs
from jrc._jaxpr.mark import mark_of
from jrc._jaxpr.primitives import primitive_name
from jrc._jaxpr.program import Program, evaluate
from jrc._jaxpr.random_bits import bits_of_slice
from jrc._jaxpr.slices import Slices, counted, sliced
from jrc._tree import is_floating


def slice_program(slices: Slices, share: Fraction, results: Sequence[Var]) -> Jaxpr:
    """Return the program of a slice.

    Its inputs are the whole values, then the slices of what is given, then slices of the numbers
    from 0, see `counted`.

    Args:
        slices: What runs on slices.
        share: The share of the whole that the slice is: some of `slices.parts`.
        results: The results: sums, or values of which it returns the slices.
    """
    return _Builder(slices, share).program(results)


class _Builder:
    def __init__(self, slices: Slices, share: Fraction) -> None:
        self.slices, self.share = slices, share
        self.whole = {v: Var(v.aval) for v in slices.whole}
        self.part = {place: Var(_shorter(*place, share)) for place in slices.given}
        self.counts = [Var(_count(each, share)) for each in counted(slices)]
        self.sums: dict[Var, Var] = {}

    def program(self, results: Sequence[Var]) -> Jaxpr:
        program = self.slices.program
        inputs = [*self.whole.values(), *self.part.values(), *self.counts]
        eqns: list[JaxprEqn] = []
        counts = iter(self.counts)
        for step in self.slices.steps:
            eqn = program.eqns[step.position]
            if step.of_sums:
                eqns += self._linear(eqn)
            else:
                numbers = [next(counts) for _ in step.axis.counts]
                eqns += self._step(eqn, step.axis, numbers)
        outvars = [self.sums[v] if v in self.sums else self.part[v, self.slices.axes[v]]
                   for v in results]  # fmt: skip
        return program.jaxpr.replace(
            constvars=[],
            invars=inputs,
            outvars=outvars,
            eqns=eqns,
            effects=frozenset().union(*(eqn.effects for eqn in eqns)),
        )

    def _step(self, eqn: JaxprEqn, axis: IndependentAxis, numbers: Sequence[Var]) -> list[JaxprEqn]:
        invars = [
            x if not is_variable(x) else self.whole[x] if at is None else self.part[x, at]
            for x, at in zip(eqn.invars, axis.operands, strict=True)
        ]
        eqns, outvars = on_slice(eqn, axis, self.share, invars, numbers)
        for v, at, new in zip(eqn.outvars, axis.results, outvars, strict=True):
            if axis.is_summed:
                self.sums[v] = new
            elif at is not None:
                self.part[v, at] = new
        return eqns

    def _linear(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """An equation of sums, on what this slice adds to them."""
        given = {**self.whole, **self.sums}
        outvars = [Var(v.aval) for v in eqn.outvars]
        self.sums |= dict(zip(eqn.outvars, outvars, strict=True))
        invars = [given[x] if is_variable(x) else x for x in eqn.invars]
        return [eqn.replace(invars=invars, outvars=outvars)]


Rewritten = tuple[list[JaxprEqn], list[Any]]


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a slice of an equation is made of.

    Attributes:
        eqn: The equation.
        axis: The axis of the slice.
        share: The share of the whole that the slice is.
        invars: The operands, slices where they have the axis.
        numbers: The positions that the axis counts.
        avals: The types of the results.
    """

    eqn: JaxprEqn
    axis: IndependentAxis
    share: Fraction
    invars: Sequence[Any]
    numbers: Sequence[Any]
    avals: Sequence[Any]

    def call(self, function: Callable[..., Any], *more: Any) -> Rewritten:
        """The equations that call a function in the place of the equation."""
        invars = [*self.invars, *more]
        traced = jax.make_jaxpr(lambda *args: function(*args))(*map(abstract, invars))
        eqns, outvars = splice(traced, invars)
        return [each.replace(source_info=self.eqn.source_info) for each in eqns], outvars


def on_slice(
    eqn: JaxprEqn,
    axis: IndependentAxis,
    share: Fraction,
    invars: Sequence[Any],
    numbers: Sequence[Any] = (),
) -> Rewritten:
    """Return the equations for a slice of what an equation computes, and their results.

    Args:
        eqn: The equation.
        axis: The axis of the slice.
        share: The share of the whole that the slice is.
        invars: The operands, slices where they have the axis.
        numbers: Slices of the positions that the axis counts.
    """
    if axis.is_summed:
        avals = [v.aval for v in eqn.outvars]
    else:
        avals = [v.aval if at is None else _shorter(v, at, share)
                 for v, at in zip(eqn.outvars, axis.results, strict=True)]  # fmt: skip
    part = _Part(eqn, axis, share, invars, numbers, avals)
    return _RULES.get(primitive_name(eqn), _plain)(part)


def _plain(part: _Part) -> Rewritten:
    outvars = [Var(aval) for aval in part.avals]
    params = _resized(part.eqn, part.axis, part.share)
    eqn = part.eqn.replace(invars=list(part.invars), outvars=outvars, params=params)
    return [eqn], outvars


def _iota(part: _Part) -> Rewritten:
    """Positions along the axis, repeated along the others."""
    if not part.numbers:
        return _plain(part)
    (aval,), at = part.avals, part.axis.results[0]
    return part.call(lambda x: [jax.lax.broadcast_in_dim(x, aval.shape, (at or 0,))], *part.numbers)


def _random_bits(part: _Part) -> Rewritten:
    """Bits at positions along the axis; of several keys a slice draws its own."""
    (at,) = part.axis.results
    if not part.numbers or at is None:
        return _plain(part)
    return part.call(lambda key, x: [bits_of_slice(part.eqn, at, key, x)], *part.numbers)


def _with_programs(part: _Part) -> Rewritten:
    """A loop, a conditional or a region: the programs inside get slices too."""
    eqn, axis = part.eqn, part.axis
    jaxprs = inner_programs(eqn)
    first = len(eqn.invars) - len(jaxprs[0].invars)
    end = sum(loop_parts(eqn)) if primitive_name(eqn) == "scan" else len(eqn.invars)
    axes = [at if at is None or i < end else at - 1 for i, at in enumerate(axis.operands)][first:]
    inner = [_on_slices(jaxpr, axes, part.share) for jaxpr in jaxprs]
    if part.numbers:
        return part.call(_loop_that_reads(inner[0], eqn), *part.numbers)
    key = "branches" if "branches" in eqn.params else "jaxpr"
    value = tuple(inner) if key == "branches" else inner[0]
    outvars = [Var(aval) for aval in part.avals]
    params = eqn.params | {key: value}
    return [eqn.replace(invars=list(part.invars), outvars=outvars, params=params)], outvars


def _loop_that_reads(body: Jaxpr, eqn: JaxprEqn) -> Callable[..., list[Any]]:
    """A loop with another body, which reads positions first; they come last among its operands."""
    consts, carried = loop_parts(eqn)
    step, count, end = evaluate(body), len(eqn.invars), consts + carried
    options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}

    def run(*operands: Any) -> list[Any]:
        fixed = [*operands[count:], *operands[:consts]]

        def one(carry: Any, xs: Any) -> tuple[Any, Any]:
            found = step(*fixed, *carry, *xs)
            return found[:carried], found[carried:]

        carry, made = jax.lax.scan(
            one, list(operands[consts:end]), list(operands[end:count]), **options
        )
        return [*carry, *made]

    return run


def _linear_solve(part: _Part) -> Rewritten:
    """The solution of linear equations: each of its programs gets slices."""
    eqn, axes = part.eqn, part.axis.operands
    jaxprs = {
        each.name: _on_slices(each.jaxpr, [axes[i] for i in each.operands], part.share)
        for each in solver_programs(eqn)
    }
    outvars = [Var(aval) for aval in part.avals]
    params = with_solver_programs(eqn, jaxprs)
    return [eqn.replace(invars=list(part.invars), outvars=outvars, params=params)], outvars


def _checkpoint(part: _Part) -> Rewritten:
    """A `jax.checkpoint` region that `jax_remat3` wraps: its types are not only in the program."""
    eqn = part.eqn
    call = _on_slices(inner_program(eqn), part.axis.operands, part.share)
    return part.call(region_around(eqn, _as_function(call, eqn)))


def _name(part: _Part) -> Rewritten:
    """A `checkpoint_name` that `jax_remat3` wraps: it has the type of the whole."""
    (name, _) = mark_of(part.eqn) or ("", 0)
    return part.call(lambda x: [checkpoint_name(x, name)])


def _custom_jvp(part: _Part) -> Rewritten:
    """A function with a derivative of its own: both get slices."""
    eqn, axis, count = part.eqn, part.axis, len(part.avals)
    call = _on_slices(inner_program(eqn), axis.operands, part.share)
    floating = floating_positions(eqn.invars)
    places = [*axis.operands, *(axis.operands[i] for i in floating)]

    function: Any = jax.custom_jvp(_as_function(call, eqn))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # Not before: the rule may call the function itself.
        rule = _on_slices(tangents_of(eqn), places, part.share)
        found = evaluate(rule)(*primals, *(tangents[i] for i in floating))
        results, made = found[:count], iter(found[count:])
        zero = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
        return results, [next(made) if is_floating(x) else zero(x) for x in results]

    return part.call(function)


def _custom_vjp(part: _Part) -> Rewritten:
    """The same of a function with cotangents of its own."""
    eqn, axis, count = part.eqn, part.axis, len(part.avals)
    call = _on_slices(inner_program(eqn), axis.operands, part.share)
    floating = floating_positions(eqn.outvars)
    places = [*axis.operands, *(axis.results[i] for i in floating)]

    @functools.cache
    def rule() -> tuple[Jaxpr, Jaxpr]:
        on_slices = _on_slices(cotangents_of(eqn).program, places, part.share)
        return split_at_cotangents(on_slices, len(eqn.invars), len(eqn.outvars))

    function: Any = jax.custom_vjp(_as_function(call, eqn))

    def forward(*args: Any) -> Any:
        found = evaluate(rule()[0])(*args)
        return found[:count], found[count:]

    def backward(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        made = evaluate(rule()[1])(*saved, *(cotangents[i] for i in floating))
        of_operands = dict(zip(cotangents_of(eqn).operands, made, strict=True))
        return tuple(of_operands.get(i) for i in range(len(eqn.invars)))  # None: zeros

    function.defvjp(forward, backward)
    return part.call(function)


def _as_function(call: Jaxpr, eqn: JaxprEqn) -> Callable[..., list[Any]]:
    """A program as a function with the name of the one that an equation calls."""

    def run(*args: Any) -> list[Any]:
        return evaluate(call)(*args)

    run.__name__ = call_name(eqn) or run.__name__
    return run


def _on_slices(jaxpr: Jaxpr, axes: Sequence[int | None], share: Fraction) -> Jaxpr:
    """A program with the same inputs and results, of which those with an axis are slices.

    Slices of positions that it counts come first among its inputs.
    """
    program = Program(inline_all(jaxpr))
    inputs = program.jaxpr.invars
    found = {v: at for v, at in zip(inputs, axes, strict=True) if at is not None}
    slices = sliced(program, found, independent_axes, inputs_alone=True)
    outvars = dict.fromkeys(filter(is_variable, program.jaxpr.outvars))
    made = [v for v in outvars if v in slices.made]
    one = slice_program(slices, share, made)
    short = {v: Var(_shorter(v, at, share)) for v, at in found.items()}
    counts = [Var(_count(each, share)) for each in counted(slices)]
    eqns, parts = splice(one, [*slices.whole, *(short[v] for v, _ in slices.given), *counts])
    results: dict[Any, Any] = {**short, **dict(zip(made, parts, strict=True))}
    # What is the same in all slices is made in front of them, a count of steps for one.
    same = [v for v in outvars if v not in results]
    live = program.live([*slices.read, *same])
    before = [program.eqns[p] for p, is_live in enumerate(live) if is_live and p not in slices.run]
    return program.jaxpr.replace(
        invars=[*counts, *(short.get(v, v) for v in inputs)],
        outvars=[results.get(v, v) if is_variable(v) else v for v in program.jaxpr.outvars],
        eqns=[*before, *eqns],
    )


_RULES: dict[str, Callable[[_Part], Rewritten]] = {
    "iota": _iota,
    "random_bits": _random_bits,
    "scan": _with_programs,
    "custom_linear_solve": _linear_solve,
    "cond": _with_programs,
    "jit": _with_programs,
    "remat2": _with_programs,
    "RematTraced": _checkpoint,
    "CheckpointName": _name,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}


def _resized(eqn: JaxprEqn, axis: IndependentAxis, share: Fraction) -> dict[str, Any]:
    """Return the parameters of the equation for a slice that is this share of an axis."""
    params = dict(eqn.params)
    (to, *_) = axis.results
    if to is None or primitive_name(eqn) == "random_bits":  # its shape is that of one key's bits
        return params
    for key in ("shape", "new_sizes", "slice_sizes", "limit_indices"):
        if key in params and eqn.primitive.name != "gather":
            params[key] = shorter(params[key], to, share)
    if eqn.primitive.name == "gather" and axis.operands[0] is not None:
        numbers = params["dimension_numbers"]
        if axis.operands[0] not in numbers.operand_batching_dims:
            params["slice_sizes"] = shorter(params["slice_sizes"], axis.operands[0], share)
    if is_convolution(eqn) and None not in axis.operands:  # some of its groups
        for key in ("batch_group_count", "feature_group_count"):
            params[key] = max(int(params[key] * share), 1)
    return params


def shorter(shape: Sequence[int], axis: int, share: Fraction) -> tuple[int, ...]:
    """Return the shape of a slice that is this share of an axis.

    >>> shorter((2, 6), 1, Fraction(2, 3))
    (2, 4)
    """
    return tuple(int(n * share) if i == axis else n for i, n in enumerate(shape))


def _shorter(v: Any, axis: int, share: Fraction) -> Any:
    return v.aval.update(shape=shorter(shape_of(v), axis, share))


def _count(numbers: jax.ShapeDtypeStruct, share: Fraction) -> Any:
    part = jax.ShapeDtypeStruct(shorter(numbers.shape, 0, share), numbers.dtype)
    return jax.make_jaxpr(lambda x: x)(part).invars[0].aval
