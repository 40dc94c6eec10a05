"""A gradient program as XLA gets it: one list of operations, calls inlined, aliases followed.

Operations that compute the same from the same values are one.

A `jax.checkpoint` region of the backward pass waits for its inputs: JAX puts a barrier there. What
is a name or a reshape of a value is that value.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._jaxpr import (
    Fusion,
    facts_of,
    has_barrier,
    inner_programs,
    is_variable,
    loop_parts,
    parameters_of,
    precisions_of,
    primitive_name,
)
from jrc.remat._planner.costs.compilers import Compiler

BARRIER, COPY = "barrier", "copy"
RANDOM_BITS = "random_bits"
# Inside of a `shard_map` sizes are those of one device.
_CALLS = ("jit", "custom_jvp_call", "custom_vjp_call", "shard_map")


@dataclasses.dataclass(eq=False)
class Operation:
    """One operation; values are numbers, indices into `Operations.sizes`.

    Attributes:
        name: Its primitive, or `BARRIER`, `COPY`.
        reads: Its operands that are no constants.
        makes: Its results.
        eqn: The equation that it comes from; `None` of a copy that the compiler adds.
        rounded: Those of its operands that it reads in products alone, as bfloat16.
    """

    name: str
    reads: list[int]
    makes: list[int]
    eqn: Any
    rounded: frozenset[int] = frozenset()


class Operations:
    """The live operations of a program.

    Attributes:
        list: The operations in program order.
        sizes: Bytes of every value.
        shapes: Its shape.
        results: The values that the program returns.
        rounded: The values that products alone read, as bfloat16.
    """

    def __init__(self, jaxpr: Any, compiler: Compiler) -> None:
        self.compiler = compiler
        self.list: list[Operation] = []
        self.sizes: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self._known: dict[Any, list[int]] = {}
        self._constants: dict[int, Operation] = {}
        self._as_bfloat16: dict[int, int] = {}
        given = (*jaxpr.constvars, *jaxpr.invars)
        values: dict[Any, int | None] = {v: self._new(v.aval) for v in given}
        self.rounded: set[int] = set()
        self._add(jaxpr, values)
        found = [values.get(x) for x in jaxpr.outvars if is_variable(x)]
        self.results = list(dict.fromkeys(v for v in found if v is not None))
        self._drop_dead()
        if compiler.rounds_operands:
            self._round_operands()

    def new(self, size: int, shape: tuple[int, ...]) -> int:
        """Add a value and return its number."""
        self.sizes.append(size)
        self.shapes.append(shape)
        return len(self.sizes) - 1

    def _new(self, aval: Any) -> int:
        made = self.new(self.compiler.array_bytes(aval), tuple(getattr(aval, "shape", ())))
        is_array = isinstance(aval, jax.core.ShapedArray)
        if self.compiler.rounds_operands and is_array and aval.dtype == jnp.float32:
            self._as_bfloat16[made] = self.compiler.array_bytes(aval.update(dtype=jnp.bfloat16))
        return made

    def _add(self, jaxpr: Any, values: dict[Any, int | None]) -> None:
        for eqn in jaxpr.eqns:
            reads = [values.get(x) if is_variable(x) else None for x in eqn.invars]
            name, inner = primitive_name(eqn), inner_programs(eqn)
            is_call = name in _CALLS or facts_of(eqn).is_region
            if inner and is_call and len(inner[0].invars) == len(reads):
                if has_barrier(eqn):
                    reads = self._behind_barrier(eqn, reads)
                self._add_call(eqn, inner[0], reads, values)
            elif name == "device_put":
                self._add_placements(eqn, reads, values)
            elif _is_alias(eqn) and reads[0] is not None:
                values[eqn.outvars[0]] = reads[0]
            else:
                key = None if inner or eqn.effects else self._key_of(eqn, reads)
                if key in self._known:
                    values.update(zip(eqn.outvars, self._known[key], strict=True))
                    continue
                makes = [self._new(v.aval) for v in eqn.outvars]
                values.update(zip(eqn.outvars, makes, strict=True))
                if inner and facts_of(eqn).construct:
                    reads = [self._own_constant(v) for v in reads]
                self._append(name, eqn, reads, makes)
                if key is not None:
                    self._known[key] = makes
                    if self._are_constants(reads):
                        self._constants.update(dict.fromkeys(makes, self.list[-1]))

    def _key_of(self, eqn: Any, reads: Sequence[int | None]) -> Any:
        """What an equation computes, as a key; `None` where there is none.

        A reshape is its operand, so that types are part of it. The literal that a call passes is
        not known inside.
        """
        pairs = list(zip(eqn.invars, reads, strict=True))
        if any(value is None and is_variable(x) for x, value in pairs):
            return None
        number = _number if self._are_constants(reads) else lambda literal: literal
        operands = [("literal", number(x.val)) if v is None else v for x, v in pairs]
        types = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        key = (eqn.primitive, *operands, *types, *parameters_of(eqn))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _are_constants(self, reads: Sequence[int | None]) -> bool:
        """Whether what an equation reads depends on no input: it is the same in each region."""
        return all(v is None or v in self._constants for v in reads)

    def _own_constant(self, value: int | None) -> int | None:
        """A constant made once more, for a loop: it writes over what it carries."""
        if value is None or value not in self._constants:
            return value
        made = self._constants[value]
        again = self.new(self.sizes[value], self.shapes[value])
        makes = [
            again if v == value else self.new(self.sizes[v], self.shapes[v]) for v in made.makes
        ]
        self.list.append(dataclasses.replace(made, makes=makes))
        return again

    def _add_placements(
        self, eqn: Any, reads: Sequence[int | None], values: dict[Any, int | None]
    ) -> None:
        """Each operand is its result, unless that lies in another memory."""
        for old, value, new in zip(eqn.invars, reads, eqn.outvars, strict=True):
            if value is None or _memory(old.aval) == _memory(new.aval):
                values[new] = value
                continue
            values[new] = made = self._new(new.aval)
            self.list.append(Operation(COPY, [value], [made], None))

    def _append(self, name: str, eqn: Any, reads: Sequence[Any], makes: list[int]) -> None:
        if name == "optimization_barrier":
            pairs = [(i, o) for i, o in zip(reads, makes, strict=True) if i is not None]
            reads, makes = [i for i, _ in pairs], [o for _, o in pairs]
            name = BARRIER
        operation = Operation(name, [i for i in reads if i is not None], makes, eqn)
        if self.compiler.rounds_operands:
            operation.rounded = self._rounded_by(eqn, reads)
        self.list.append(operation)

    def _rounded_by(self, eqn: Any, reads: Sequence[int | None]) -> frozenset[int]:
        """Those of an equation's operands that it reads in products of one pass alone."""
        if facts_of(eqn).is_contraction:
            is_rounded = [_has_one_pass(eqn)] * len(reads)
        elif primitive_name(eqn) == "scan":
            is_rounded = self._rounded_in_loop(eqn)
        else:
            return frozenset()
        whole = {v for v, rounds in zip(reads, is_rounded, strict=True) if not rounds}
        return frozenset(v for v in reads if v is not None and v not in whole)

    def _rounded_in_loop(self, eqn: Any) -> list[bool]:
        """For each operand of a loop, whether its body rounds it; a carry may be more than that."""
        (body,) = inner_programs(eqn)
        inside = Operations(body, self.compiler)
        first = len(body.constvars)
        consts, carried = loop_parts(eqn)
        carries = range(consts, consts + carried)
        count = len(eqn.invars)
        return [i not in carries and first + i in inside.rounded for i in range(count)]

    def _round_operands(self) -> None:
        """Let what products alone read, or move to where they read it, be bfloat16."""
        whole = set(self.results)
        for operation in reversed(self.list):
            if operation.name == BARRIER:
                pairs = zip(operation.reads, operation.makes, strict=True)
                whole.update(v for v, made in pairs if made in whole)
            elif not (_moves(operation) and whole.isdisjoint(operation.makes)):
                whole.update(v for v in operation.reads if v not in operation.rounded)
            if operation.name == "scan":
                whole.update(operation.makes[: loop_parts(operation.eqn)[1]])
        self.rounded = set(range(len(self.sizes))) - whole
        for operation in self.list:
            for v in self.rounded.intersection(operation.makes):
                self.sizes[v] = self._as_bfloat16.get(v, self.sizes[v])

    def _add_call(
        self, eqn: Any, body: Any, reads: Sequence[Any], values: dict[Any, int | None]
    ) -> None:
        within: dict[Any, int | None] = dict(zip(body.invars, reads, strict=True))
        self._add(body, within)
        for var, result in zip(eqn.outvars, body.outvars, strict=True):
            values[var] = within.get(result) if is_variable(result) else None

    def _behind_barrier(self, eqn: Any, reads: Sequence[Any]) -> list[int]:
        makes = [self._new(x.aval) for x in eqn.invars]
        pairs = [(i, o) for i, o in zip(reads, makes, strict=True) if i is not None]
        self.list.append(Operation(BARRIER, [i for i, _ in pairs], [o for _, o in pairs], eqn))
        return makes

    def _drop_dead(self) -> None:
        needed, live = set(self.results), []
        for operation in reversed(self.list):
            if not needed.isdisjoint(operation.makes):
                needed.update(operation.reads)
                live.append(operation)
        self.list = live[::-1]


def _number(literal: Any) -> Any:
    """A literal's value as a number, which has a hash: it is an array without axes."""
    if getattr(literal, "shape", None) != ():
        return literal
    number = literal.item()
    # Zeros of both signs are equal.
    return (number, math.copysign(1.0, number)) if isinstance(number, float) else number


def _memory(aval: Any) -> Any:
    return getattr(aval, "memory_space", None)


def _has_one_pass(product: Any) -> bool:
    """Whether a product of float32 is one of bfloat16, and not several."""
    default = (None, jax.lax.Precision.DEFAULT)
    return all(each in default for each in precisions_of(product))


def _moves(operation: Operation) -> bool:
    """Whether an operation moves entries into its one result, as they are."""
    if operation.eqn is None or len(operation.makes) != 1:
        return False
    facts = facts_of(operation.eqn)
    is_fused = facts.is_gathering or facts.fusion is Fusion.INSIDE
    return facts.moves_data and is_fused and operation.name != "convert_element_type"


def _is_alias(eqn: Any) -> bool:
    """Whether a result is its operand, in the same bytes."""
    name = primitive_name(eqn)
    if name == "convert_element_type":
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    return name in _ALIASES or (facts_of(eqn).is_view and name != "optimization_barrier")


_ALIASES = ("stop_gradient", "expand_dims")
