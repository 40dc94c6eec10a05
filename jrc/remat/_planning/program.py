"""The program that a plan is made for, and how it is known again."""

import dataclasses
import difflib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrc._jaxpr import Program, Traced, inner_programs, is_variable, label, primitive_name, trace
from jrc.remat._planning.run import opened


def traced_for_plan(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Traced:
    """The function's program without `jit` calls; numbers are inputs, as under `jax.jit`."""
    args, kwargs = jax.tree.map(as_array, (args, dict(kwargs)))
    # Without `jit`, JAX writes loops out turn by turn: another program.
    with jax.disable_jit(False):
        return trace(fn, args, kwargs, lambda _: True)


def as_array(leaf: Any) -> Any:
    """A leaf as `jax.jit` takes it: numbers and NumPy arrays are arrays."""
    number = isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic)
    return jnp.asarray(leaf) if number else leaf


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a program is known by: its equations in words, and a hash of how they hang together.

    Attributes:
        equations: Every equation as `dot_general:float32(4,8)`, in program order.
        digest: A hash of operators, types and dataflow; source lines do not enter.
    """

    equations: tuple[str, ...]
    digest: str

    def difference(self, other: "Signature") -> str | None:
        """In words, how another program differs from this one, if it does."""
        if self == other:
            return None
        if self.equations == other.equations:
            return "the same operators are joined, or their inputs are made, in another way"
        matcher = difflib.SequenceMatcher(None, self.equations, other.equations, autojunk=False)
        changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
        _, a, b, c, d = changes[0]
        was = ", ".join(self.equations[a : min(b, a + 3)]) or "nothing"
        now = ", ".join(other.equations[c : min(d, c + 3)]) or "nothing"
        more = f" (and {len(changes) - 1} more places)" if len(changes) > 1 else ""
        return f"equation {a} was {was}, now it is {now}{more}"


def signature_of(program: Program) -> Signature:
    """How a program is known again, in any process and after its source has moved."""
    words = tuple(_words(eqn) for eqn in program.eqns)
    return Signature(words, hashlib.sha256("\n".join(_lines(program)).encode()).hexdigest()[:32])


def _words(eqn: Any) -> str:
    name, _, shape = label(eqn).partition("@")[0].partition(":")
    return f"{name}:{getattr(eqn.outvars[0].aval, 'dtype', '')}{shape}" if eqn.outvars else name


def _lines(program: Program) -> list[str]:
    inputs = (*program.jaxpr.constvars, *program.jaxpr.invars)
    number = {v: k for k, v in enumerate(inputs)}
    lines = [" ".join(_type(v.aval) for v in inputs)]

    def said(x: Any) -> str:
        return str(number[x]) if is_variable(x) else _type(x.aval)

    for eqn in program.eqns:
        for v in eqn.outvars:
            number[v] = len(number)
        made = " ".join(_type(v.aval) for v in eqn.outvars)
        lines.append(f"{primitive_name(eqn)} {' '.join(map(said, eqn.invars))} -> {made}")
        for jaxpr in inner_programs(eqn):
            lines += [f"  {line}" for line in _lines(opened(jaxpr))]
    return [*lines, " ".join(map(said, program.jaxpr.outvars))]


def _type(aval: Any) -> str:
    shape = ",".join(str(n) for n in getattr(aval, "shape", ()))
    return f"{getattr(aval, 'dtype', aval)}[{shape}]"
