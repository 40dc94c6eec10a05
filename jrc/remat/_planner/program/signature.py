"""Fingerprints of programs: whether a plan belongs to the program that it is applied to."""

import dataclasses
import difflib
import hashlib
import types
from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import (
    Program,
    inlined_program,
    inner_programs,
    is_variable,
    label,
    loop_parts,
    parameters_of,
    policy_in,
    primitive_name,
    tag_of,
)
from jrc._tree import place_difference
from jrc.remat._planner.program.trace import TracedForPlan

# Parameters that describe the types of values, which a cast to vary over a mesh axis changes; and
# the precision of products, which changes no dataflow.
_NOT_COMPARED = frozenset({"weak_type", "linear", "precision"})


@dataclasses.dataclass(frozen=True)
class Signature:
    """The fingerprint of a program: its equations in words, and a hash of its dataflow.

    Attributes:
        equations: Every equation as `dot_general:float32(4,8)`, in program order.
        digest: A hash of operators, their axes and the like, types and dataflow; neither source
            lines nor constants of the program enter.
        inputs: Types of the arrays that it is given, those that the function closes over first.
        closed: How many of them the function closes over. Neither this nor `inputs` is compared:
            where an array comes from does not change a program.
        respect_checkpoints: Whether `jax.checkpoint` regions of the function stay regions; else
            the program is the one without them.
        written: A hash of the program with the regions that are opened; empty without any.
        names: The path of each array among the arguments, `params/w`, for errors; not compared.
    """

    equations: tuple[str, ...]
    digest: str
    inputs: tuple[str, ...] = dataclasses.field(compare=False)
    closed: int = dataclasses.field(compare=False)
    respect_checkpoints: bool = False
    written: str = dataclasses.field(default="", compare=False)
    names: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def difference(self, other: "Signature") -> str | None:
        """Return in words how another program differs from this one; `None` if it does not."""
        if self == other:
            return None
        words = (self._other_inputs(other), self._other_equations(other))
        return "; ".join(filter(None, words)) or (
            "the same operators are joined in another way, work along other axes, or differ inside"
        )

    def other_operators(self, other: "Signature") -> str | None:
        """Return in words how the operators of another program differ, whatever their sizes."""
        was, now = ([text.partition(":")[0] for text in x.equations] for x in (self, other))
        if was == now:
            return None
        return self._other_equations(other)

    def _other_inputs(self, other: "Signature") -> str | None:
        """How the inputs of the programs differ, in words."""
        was, now = len(self.inputs) - self.closed, len(other.inputs) - other.closed
        if (was, self.closed) != (now, other.closed):
            text = (
                f"it was made for {was} arrays as arguments and {self.closed} that the function "
                f"closes over, now there are {now} and {other.closed}"
            )
            if self.closed != other.closed:
                more = "Arrays that a function closes over are no arguments: pass as arguments what"
                return f"{text}. {more} jrc.plan was given as such"
            changes = self._other_names(other)
            return f"{text}: {changes}" if changes else text
        pairs = enumerate(zip(self.inputs, other.inputs, strict=True))
        changed = [(i - self.closed, a, b) for i, (a, b) in pairs if a != b and i >= self.closed]
        if not changed:
            return None
        i, a, b = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        # Those of this call: in the function that the plan was made for they may have others.
        name = repr(other.names[i]) if i < len(other.names) else f"array {i} of the arguments"
        return f"{name} was {a}, now it is {b}{more}"

    def _other_names(self, other: "Signature") -> str:
        """Which arguments came or went, in words; empty where the plan knows no names."""
        if not self.names:
            return ""
        # The function of the plan may call its arguments otherwise: then their places tell more.
        ways = [[key(each.names) for each in (self, other)] for key in (_by_name, _by_place)]
        was, now = min(ways, key=lambda way: len(way[0].keys() ^ way[1].keys()))
        return place_difference(was, now, "missing", "not expected")

    def _other_equations(self, other: "Signature") -> str | None:
        """Where the equations differ first, in words."""
        matcher = difflib.SequenceMatcher(None, self.equations, other.equations, autojunk=False)
        changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
        if not changes:
            return None
        _, a, b, c, d = changes[0]
        was = ", ".join(self.equations[a : min(b, a + 3)]) or "nothing"
        now = ", ".join(other.equations[c : min(d, c + 3)]) or "nothing"
        more = f" (and {len(changes) - 1} more places)" if len(changes) > 1 else ""
        text = f"equation {a} was {was}, now it is {now}{more}"
        changed = [
            x for _, a, b, c, d in changes for x in (*self.equations[a:b], *other.equations[c:d])
        ]
        if all(x.startswith("convert_element_type:") for x in changed):
            more = "An array such as jnp.log(2.0) has a weak type: jnp.asarray(x, x.dtype) has none"
            return f"{text}. {more}"
        return text


def _by_name(names: Sequence[str]) -> dict[str, str]:
    return {name: name for name in names}


def _by_place(names: Sequence[str]) -> dict[str, str]:
    """Return paths by the place of their argument: `1/w` for `params/w` of the second one."""
    place = {argument: i for i, argument in enumerate(dict.fromkeys(map(_argument, names)))}
    return {f"{place[_argument(x)]}{x.removeprefix(_argument(x))}": x for x in names}


def _argument(name: str) -> str:
    return name.partition("/")[0]


def signature_of(traced: TracedForPlan, respect_checkpoints: bool = False) -> Signature:
    """Return the fingerprint of a program, the same in any process and at any source line.

    Casts do not count, so that it is the same inside of `shard_map`.
    """
    program = traced.program
    return Signature(
        equations=tuple(_words(program.eqns[p]) for p in program.steps),
        digest=_digest(program),
        inputs=tuple(_type(v.aval) for v in program.jaxpr.invars),
        closed=traced.closed,
        respect_checkpoints=respect_checkpoints,
        written=_digest(inlined_program(traced.written)) if traced.regions else "",
        names=traced.names,
    )


def _digest(program: Program) -> str:
    order = _by_first_use([program], len(program.jaxpr.invars))
    return hashlib.sha256("\n".join(_lines(program, order)).encode()).hexdigest()[:32]


def _words(eqn: Any) -> str:
    name, _, shape = label(eqn).partition("@")[0].partition(":")
    return f"{name}:{getattr(eqn.outvars[0].aval, 'dtype', '')}{shape}" if eqn.outvars else name


def _lines(program: Program, order: Sequence[int]) -> list[str]:
    """The program in words, its inputs numbered in this order."""
    given = [program.jaxpr.invars[i] for i in order]
    number = {v: k for k, v in enumerate((*program.jaxpr.constvars, *given))}
    lines = [" ".join(_type(v.aval) for v in number)]

    def text(x: Any) -> str:
        x = program.source(x)
        return str(number[x]) if is_variable(x) else _type(x.aval)

    for eqn in (program.eqns[p] for p in program.steps):
        for v in eqn.outvars:
            number[v] = len(number)
        inner = [inlined_program(jaxpr) for jaxpr in inner_programs(eqn)]
        first, then = _order_inside(eqn, inner)
        reads = [*eqn.invars[:first], *(eqn.invars[first + i] for i in then)]
        made = " ".join(_type(v.aval) for v in eqn.outvars)
        name = f"{primitive_name(eqn)} {tag_of(eqn) or ''}{_settings(eqn)}"
        lines.append(f"{name} {' '.join(map(text, reads))} -> {made}")
        for each in inner:
            more = _lines(each, then or range(len(each.jaxpr.invars)))
            lines += [f"  {line}" for line in more]
    return [*lines, " ".join(map(text, program.jaxpr.outvars))]


def _settings(eqn: Any) -> str:
    """The whole numbers among an operator's parameters: axes, lengths, directions; its policy."""
    settings = {key: _numbers_of(x) for key, x in parameters_of(eqn) if key not in _NOT_COMPARED}
    if callable(policy := policy_in(eqn)):
        settings["policy"] = _function(policy)
    return "".join(f" {key}={settings[key]}" for key in sorted(settings) if settings[key])


def _numbers_of(setting: Any) -> str:
    if isinstance(setting, tuple | list):
        return f"({','.join(map(_numbers_of, setting))})"
    return str(int(setting)) if isinstance(setting, int) else ""


def _function(fn: Any) -> str:
    """A function's name and what it closes over: `save_only_these_names` differs by its names.

    An object that is called, as that policy is in JAX 0.11, has attributes in their place.
    """
    cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    if not isinstance(fn, types.FunctionType):
        cells += [value for _, value in sorted(getattr(fn, "__dict__", {}).items())]
    return f"{getattr(fn, '__qualname__', type(fn).__name__)}({','.join(map(_constant, cells))})"


def _constant(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return f"{{{','.join(sorted(map(_constant, value)))}}}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(_constant, value))})"
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return _function(value) if callable(value) else type(value).__name__


def _order_inside(eqn: Any, inner: Sequence[Program]) -> tuple[int, Sequence[int]]:
    """How many inputs of an equation come before those of the programs inside; these in order.

    Carries and sliced inputs of a loop keep their place. So do the operands of a Pallas kernel,
    whose program has inputs for its results and its scratch memory too.
    """
    counts = {len(each.jaxpr.invars) for each in inner}
    most = max(counts, default=0)
    if len(counts) != 1 or most > len(eqn.invars) or primitive_name(eqn) == "while":
        return len(eqn.invars), ()
    (count,) = counts
    free = loop_parts(eqn)[0] if primitive_name(eqn) == "scan" else count
    return len(eqn.invars) - count, [*_by_first_use(inner, free), *range(free, count)]


def _by_first_use(programs: Sequence[Program], count: int) -> list[int]:
    """The first inputs of these programs in the order in which they are read.

    Closed-over arrays come in the order of tracing, and casts are traced first.
    """
    found: dict[int, None] = {}
    for program in programs:
        number = {v: i for i, v in enumerate(program.jaxpr.invars[:count])}
        atoms = (v for p in program.steps for v in program.sources(p))
        found |= dict.fromkeys(number[v] for v in atoms if v in number)
    return [*found, *(i for i in range(count) if i not in found)]


def _type(aval: Any) -> str:
    shape = ",".join(str(n) for n in getattr(aval, "shape", ()))
    return f"{getattr(aval, 'dtype', aval)}[{shape}]"
