"""Callbacks: the forward operators and the gradient operator that they are called with."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jrc._jaxpr import Program, is_variable, mark_of, primitive_name
from jrc.compat.paddle._names import mark_pairs

GRAD = "@GRAD"

Callback = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator; prints as `dot_general(x, w) -> y`.

    Attributes:
        type: The primitive's name; `_grad` is added for the operator of its gradient.
        inputs: Names of the values that it reads.
        outputs: Names of its results.
    """

    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        """Return the operator on one line."""
        return f"{self.type}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}"


@dataclasses.dataclass(frozen=True)
class Block:
    """The forward program of a loss function; prints as one operator a line.

    Attributes:
        ops: Its operators in program order, nested `jit` calls inlined, without marks.
    """

    ops: tuple[Operator, ...]

    def __str__(self) -> str:
        """Return the operators, one a line."""
        return "\n".join(map(str, self.ops))


def checked_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Return the callbacks as a tuple, or raise if one is not a function."""
    if callbacks is None:
        return ()
    several = callbacks if isinstance(callbacks, list | tuple) else (callbacks,)
    for callback in several:
        if not callable(callback):
            raise TypeError(
                "callbacks must be a function callback(block, context) or a list of them, "
                f"got {callback!r}. Write callbacks=[callback]."
            )
    return tuple(several)


def call_back(
    callbacks: Sequence[Callback],
    program: Program,
    inputs: Mapping[Any, str],
    receiving: Collection[Any],
) -> None:
    """Call each callback for every forward equation with a gradient, the last one first.

    Args:
        callbacks: The callbacks, called in their order.
        program: The forward program, without nested `jit` calls.
        inputs: Names of its inputs.
        receiving: The values that have a gradient.
    """
    names = _names(program, inputs)
    forward = [_operator(program, eqn, names) for eqn in program.eqns if mark_of(eqn) is None]
    equations = [eqn for eqn in program.eqns if mark_of(eqn) is None]
    gradients = [
        _gradient(op, _flowing(program, eqn.outvars, names, receiving), flowing)
        for eqn, op in zip(equations, forward, strict=True)
        if (flowing := _flowing(program, eqn.invars, names, receiving))
        and any(var in receiving for var in eqn.outvars)
    ]
    context = {
        name: name.removesuffix(GRAD)
        for op in reversed(gradients)
        for name in (*op.inputs, *op.outputs)
        if name.endswith(GRAD)
    }
    block = Block(tuple(forward))
    for op in reversed(gradients):
        for callback in callbacks:
            callback(block=block, context=context | {"__current_op_desc__": op})


def _names(program: Program, inputs: Mapping[Any, str]) -> dict[Any, str]:
    """Return a name for every value: the input's, the mark's, or the operator's with a number."""
    names: dict[Any, str] = {}
    count: Counter[str] = Counter()
    for eqn in program.eqns:
        if mark_of(eqn) is None:
            kind = primitive_name(eqn)
            one = f"{kind}_{count[kind]}"
            count[kind] += 1
            many = len(eqn.outvars) > 1
            names |= {v: f"{one}.{i}" if many else one for i, v in enumerate(eqn.outvars)}
    for mark in reversed(list(program.marks)):
        names |= {var: name for name, var in mark_pairs(program, mark).items()}
    return names | dict(inputs)


def _name(program: Program, atom: Any, names: Mapping[Any, str]) -> str:
    return names[program.unmarked(atom)] if is_variable(atom) else str(atom.val)


def _operator(program: Program, eqn: Any, names: Mapping[Any, str]) -> Operator:
    inputs = tuple(_name(program, atom, names) for atom in eqn.invars)
    return Operator(primitive_name(eqn), inputs, tuple(names[var] for var in eqn.outvars))


def _flowing(
    program: Program, atoms: Sequence[Any], names: Mapping[Any, str], receiving: Collection[Any]
) -> tuple[str, ...]:
    """Return the names of the gradients of those values that have one, each once."""
    found = dict.fromkeys(
        _name(program, atom, names) + GRAD
        for atom in atoms
        if is_variable(atom) and program.unmarked(atom) in receiving
    )
    return tuple(found)


def _gradient(op: Operator, arriving: Sequence[str], leaving: Sequence[str]) -> Operator:
    return Operator(f"{op.type}_grad", (*op.inputs, *arriving), tuple(leaving))
