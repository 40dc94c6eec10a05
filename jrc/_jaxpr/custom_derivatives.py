"""The derivative of a function that has one of its own (`custom_jvp`, `custom_vjp`), as a program.

>>> import jax, jax.numpy as jnp
>>> @jax.custom_vjp
... def scaled(x, w):
...     return x * w
>>> scaled.defvjp(lambda x, w: (x * w, (x, w)), lambda read, g: (g * read[1], g * read[0]))
>>> (eqn,) = jax.make_jaxpr(scaled)(2.0, 3.0).eqns
>>> rule = cotangents_of(eqn)
>>> len(rule.program.invars), len(rule.program.outvars), rule.operands
(3, 3, (0, 1))
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jrc._jaxpr.atoms import is_variable
from jrc._jaxpr.equations import inner_program, inner_programs, walk
from jrc._jaxpr.inline import inline_all
from jrc._jaxpr.primitives import is_linear_in, primitive_name
from jrc._jaxpr.program import Program, evaluate
from jrc._jaxpr.sums_onto_zeros import made_as_zeros
from jrc._tree import is_floating


@dataclasses.dataclass(frozen=True, eq=False)
class Cotangents:
    """The program of a `custom_vjp` call's results, and of the cotangents of its operands.

    Attributes:
        program: Its inputs are the operands, then the cotangents of floating results; its results
            are those of the call, then the cotangents of `operands`.
        operands: The operands whose cotangents are not zero.
    """

    program: Jaxpr
    operands: tuple[int, ...]


def floating_positions(atoms: Sequence[Any]) -> list[int]:
    """Return which of some operands or results have tangents."""
    return [i for i, x in enumerate(atoms) if is_floating(x.aval)]


_FOUND: weakref.WeakKeyDictionary[Jaxpr, dict[Any, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def tangents_of(eqn: JaxprEqn) -> Jaxpr:
    """Return the program of a `custom_jvp` call's results, and of the tangents of floating ones.

    Its inputs are the operands, then the tangents of floating ones.
    """
    return _once(eqn, eqn.params["jvp_jaxpr_fun"], _tangents_of)


def cotangents_of(eqn: JaxprEqn) -> Cotangents:
    """Return the program of a `custom_vjp` call's results, and of its operands' cotangents."""
    return _once(eqn, eqn.params["bwd"], _cotangents_of)


def traced_rule[T](trace: Callable[[JaxprEqn], T], eqn: JaxprEqn) -> T | None:
    """Return the program of a derivative; `None` where the user's rule cannot be traced.

    It may be one that is never asked for, or names an axis that is not there.

    Args:
        trace: `tangents_of` or `cotangents_of`.
        eqn: The equation.
    """
    try:
        return trace(eqn)
    except Exception:  # noqa: BLE001  a user's function may raise anything
        return None


def _once(eqn: JaxprEqn, rule: Any, make: Callable[[JaxprEqn], Any]) -> Any:
    """What is made of an equation; the same for each with this program and this derivative.

    Inside of a `shard_map` it is another one: only there types say over which axes values vary.
    """
    known = _FOUND.setdefault(inner_program(eqn), {})
    key = id(rule), jax.sharding.get_abstract_mesh().manual_axes
    if key not in known:
        known[key] = rule, make(eqn)
    return known[key][1]


def _tangents_of(eqn: JaxprEqn) -> Jaxpr:
    floating = floating_positions(eqn.invars)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        given = [primals[i] for i in floating]
        results, made = jax.jvp(_of_operands(eqn, primals, floating), given, list(tangents))
        return results, [t for x, t in zip(results, made, strict=True) if is_floating(x)]

    whole = [x.aval for x in eqn.invars]
    return jax.make_jaxpr(derivative)(whole, [whole[i] for i in floating])


def _cotangents_of(eqn: JaxprEqn) -> Cotangents:
    # What the function closes over comes first; JAX refuses to differentiate by it. Inside of a
    # derivative it no longer counts it, so that the refusal is what says it.
    floating = [i for i in floating_positions(eqn.invars) if i >= eqn.params["num_consts"]]
    while True:
        try:
            return _cotangents_by(eqn, floating)
        except Exception as error:
            if type(error).__name__ != "CustomVJPException" or not floating:
                raise
            del floating[0]


def _cotangents_by(eqn: JaxprEqn, floating: Sequence[int]) -> Cotangents:
    def derivative(primals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def run(*chosen: Any) -> Any:
            found = _of_operands(eqn, primals, floating)(*chosen)
            return [x for x in found if is_floating(x)], [x for x in found if not is_floating(x)]

        results, vjp, others = jax.vjp(run, *(primals[i] for i in floating), has_aux=True)
        floats, rest = iter(results), iter(others)
        merged = [next(floats) if is_floating(x.aval) else next(rest) for x in eqn.outvars]
        return merged, vjp(list(cotangents))

    given = [x.aval for x in eqn.invars]
    of_results = [eqn.outvars[i].aval for i in floating_positions(eqn.outvars)]
    program = Program(inline_all(jax.make_jaxpr(derivative)(given, of_results)))
    results, made = program.jaxpr.outvars[: len(eqn.outvars)], program.jaxpr.outvars
    pairs = zip(floating, made[len(eqn.outvars) :], strict=True)
    found = [(i, v) for i, v in pairs if made_as_zeros(program, v) is None]
    outvars = [*results, *(v for _, v in found)]
    return Cotangents(program.jaxpr.replace(outvars=outvars), tuple(i for i, _ in found))


def _of_operands(
    eqn: JaxprEqn, primals: Sequence[Any], positions: Sequence[int]
) -> Callable[..., list[Any]]:
    """An equation as a function of some of its operands."""
    inputs: list[Any] = [Var(x.aval) for x in eqn.invars]
    outputs = [Var(x.aval) for x in eqn.outvars]
    alone = inner_program(eqn).replace(
        constvars=[],
        invars=inputs,
        outvars=outputs,
        eqns=[eqn.replace(invars=inputs, outvars=outputs)],
        effects=eqn.effects,
    )

    def run(*chosen: Any) -> list[Any]:
        new = dict(zip(positions, chosen, strict=True))
        return evaluate(alone)(*(new.get(i, x) for i, x in enumerate(primals)))

    return run


def are_linear_rules(eqns: Iterable[JaxprEqn]) -> bool:
    """Return whether the backward rules of all `custom_vjp` functions in equations are linear.

    One that clips or adds to a gradient is not: for a cotangent of zero it may give another number,
    and for twice the cotangent not twice the gradient. `False` where that is not known.
    """
    for eqn in eqns:
        if primitive_name(eqn) == "custom_vjp_call" and not _is_linear_rule(eqn):
            return False
        inner = (each for jaxpr in inner_programs(eqn) for each, _ in walk(jaxpr))
        if not all(_is_linear_rule(x) for x in inner if primitive_name(x) == "custom_vjp_call"):
            return False
    return True


def _is_linear_rule(eqn: JaxprEqn) -> bool:
    rule = traced_rule(cotangents_of, eqn)
    return rule is not None and _is_linear(eqn, rule.program)


def _is_linear(eqn: JaxprEqn, rule: Jaxpr) -> bool:
    program, late = Program(rule), set(rule.invars[len(eqn.invars) :])
    for each in rule.eqns:
        reads = [is_variable(x) and x in late for x in each.invars]
        if any(reads):
            if not _is_linear_in(program, each, reads):
                return False
            late.update(each.outvars)
    return all(is_variable(x) and x in late for x in rule.outvars[len(eqn.outvars) :])


def _is_linear_in(program: Program, eqn: JaxprEqn, reads: Sequence[bool]) -> bool:
    """Whether an equation is linear in the operands that it reads of the cotangents."""
    pairs = list(zip(eqn.invars, reads, strict=True))
    are_zero = [read or made_as_zeros(program, x) is not None for x, read in pairs]
    match primitive_name(eqn):
        case "convert_element_type":
            return all(map(is_floating, (v.aval for v in eqn.outvars)))
        case "select_n":
            return not reads[0] and all(are_zero[1:])
        case "pad":
            return all(are_zero)
        case "scatter-add":
            return not reads[1] and are_zero[0] and are_zero[2]
    return is_linear_in(eqn, reads, are_zero)


def split_at_cotangents(rule: Jaxpr, operands: int, results: int) -> tuple[Jaxpr, Jaxpr]:
    """Return the forward and the backward program of one like `Cotangents.program`.

    Args:
        rule: The program.
        operands: How many of its inputs are no cotangents.
        results: How many of its results are no cotangents.

    Returns:
        The forward program, from operands to results and then what is saved, and the backward
        program, from what is saved and then the cotangents of results, to those of operands.
    """
    late = set(rule.invars[operands:])
    backward = []
    for eqn in rule.eqns:
        if any(is_variable(x) and x in late for x in eqn.invars):
            backward.append(eqn)
            late.update(eqn.outvars)
    made = {id(eqn) for eqn in backward}
    forward = [eqn for eqn in rule.eqns if id(eqn) not in made]
    wanted = rule.outvars[results:]
    read = [x for eqn in backward for x in eqn.invars] + list(wanted)
    saved = [x for x in dict.fromkeys(filter(is_variable, read)) if x not in late]
    first = rule.replace(
        invars=rule.invars[:operands], outvars=[*rule.outvars[:results], *saved], eqns=forward
    )
    second = rule.replace(
        invars=[*saved, *rule.invars[operands:]], outvars=list(wanted), eqns=backward
    )
    return first, second
