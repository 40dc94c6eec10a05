"""A gradient program as XLA gets it: one list of operations, calls inlined, aliases followed.

A `jax.checkpoint` region of the backward pass waits for its inputs: JAX puts a barrier there. What
is a name or a reshape of a value is that value.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import facts_of, inner_programs, is_variable, primitive_name
from jrc.remat._planner.platform_memory import PlatformMemory

BARRIER, COPY, BROADCAST = "barrier", "copy", "broadcast"
# Inside of a `shard_map` sizes are those of one device.
_CALLS = ("jit", "custom_jvp_call", "custom_vjp_call", "shard_map")
_BROADCASTS = ("broadcast_in_dim", "broadcast_to")


@dataclasses.dataclass(eq=False)
class Operation:
    """One operation; values are numbers, indices into `Operations.sizes`.

    Attributes:
        name: Its primitive, or `BARRIER`, `COPY`, `BROADCAST`.
        reads: Its operands that are no constants.
        makes: Its results.
        eqn: The equation that it comes from; `None` of a copy that the compiler adds.
    """

    name: str
    reads: list[int]
    makes: list[int]
    eqn: Any


class Operations:
    """The live operations of a program.

    Attributes:
        list: The operations in program order.
        sizes: Bytes of every value.
        shapes: Its shape.
        results: The values that the program returns.
    """

    def __init__(self, jaxpr: Any, memory: PlatformMemory) -> None:
        self.memory = memory
        self.list: list[Operation] = []
        self.sizes: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self._same: dict[int, int] = {}
        given = (*jaxpr.constvars, *jaxpr.invars)
        values: dict[Any, int | None] = {v: self._new(v.aval) for v in given}
        self._add(jaxpr, values)
        found = [values.get(x) for x in jaxpr.outvars if is_variable(x)]
        self.results = list(dict.fromkeys(v for v in found if v is not None))
        self._drop_dead()
        if memory.copies_operands:
            self._copy_operands_of_convolutions()
        if memory.writes_broadcasts:
            self._share_broadcasts()

    def new(self, size: int, shape: tuple[int, ...]) -> int:
        """Add a value and return its number."""
        self.sizes.append(size)
        self.shapes.append(shape)
        return len(self.sizes) - 1

    def _new(self, aval: Any) -> int:
        return self.new(self.memory.array_bytes(aval), tuple(getattr(aval, "shape", ())))

    def _add(self, jaxpr: Any, values: dict[Any, int | None]) -> None:
        for eqn in jaxpr.eqns:
            reads = [values.get(x) if is_variable(x) else None for x in eqn.invars]
            name, inner = primitive_name(eqn), inner_programs(eqn)
            is_call = name in _CALLS or facts_of(eqn).is_region
            if inner and is_call and len(inner[0].invars) == len(reads):
                if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                    reads = self._behind_barrier(eqn, reads)
                self._add_call(eqn, inner[0], reads, values)
            elif name == "device_put":
                self._add_placements(eqn, reads, values)
            elif _is_alias(eqn) and reads[0] is not None:
                values[eqn.outvars[0]] = reads[0]
            else:
                makes = [self._new(v.aval) for v in eqn.outvars]
                values.update(zip(eqn.outvars, makes, strict=True))
                self._append(name, eqn, reads, makes)

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
        self.list.append(Operation(name, [i for i in reads if i is not None], makes, eqn))

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

    def _copy_operands_of_convolutions(self) -> None:
        """Add the copies that bring operands and results of convolutions into the usual order."""
        found = []
        for operation in self.list:
            if operation.name != "conv_general_dilated" or len(operation.reads) != 2:
                found.append(operation)
                continue
            numbers = operation.eqn.params["dimension_numbers"]
            axes = len(numbers.lhs_spec)
            data = (0, axes - 1, *range(1, axes - 1))
            kernel = (axes - 1, axes - 2, *range(axes - 2))
            pairs = ((numbers.lhs_spec, data), (numbers.rhs_spec, kernel))
            for i, (order, usual) in enumerate(pairs):
                if tuple(order) != usual:
                    found.append(self._copied(operation.reads[i]))
                    operation.reads[i] = found[-1].makes[0]
            found.append(operation)
            if tuple(numbers.out_spec) != data:
                (result,) = operation.makes
                operation.makes = [self.new(self.sizes[result], self.shapes[result])]
                found.append(Operation(COPY, list(operation.makes), [result], None))
        self.list = found

    def _copied(self, value: int) -> Operation:
        made = self.new(self.sizes[value], self.shapes[value])
        return Operation(COPY, [value], [made], None)

    def _share_broadcasts(self) -> None:
        """Make each broadcast an operation of its own, one for all of its readers."""
        known: dict[Any, int] = {}
        found: list[Operation] = []
        for operation in self.list:
            operation.reads = [self._same.get(i, i) for i in operation.reads]
            if operation.name in _BROADCASTS and operation.reads and operation.eqn is not None:
                dims = str(operation.eqn.params.get("broadcast_dimensions"))
                key = (operation.reads[0], self.shapes[operation.makes[0]], dims)
                if key in known:
                    self._same[operation.makes[0]] = known[key]
                    continue
                known[key] = operation.makes[0]
                operation.name = BROADCAST
            elif operation.name in ELEMENTWISE:
                self._with_broadcast_operands(operation, known, found)
            found.append(operation)
        self.results = [self._same.get(i, i) for i in self.results]
        self.list = found

    def _with_broadcast_operands(
        self, operation: Operation, known: dict[Any, int], found: list[Operation]
    ) -> None:
        (result,) = operation.makes
        shape = self.shapes[result]
        for j, value in enumerate(operation.reads):
            own = self.shapes[value]
            if len(own) != len(shape) or own == shape or all(n == 1 for n in own):
                continue
            key = (value, shape, None)
            if key not in known:
                known[key] = self.new(self.sizes[result], shape)
                found.append(Operation(BROADCAST, [value], [known[key]], None))
            operation.reads[j] = known[key]


ELEMENTWISE = frozenset(
    "mul add sub neg div add_any integer_pow square max min select_n pow".split()
)
"""The arithmetic whose operands may be broadcast."""


def _memory(aval: Any) -> Any:
    return getattr(aval, "memory_space", None)


def _is_alias(eqn: Any) -> bool:
    """Whether a result is its operand, in the same bytes."""
    name = primitive_name(eqn)
    if name == "convert_element_type":
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    return name in _ALIASES or (facts_of(eqn).is_view and name != "optimization_barrier")


_ALIASES = ("stop_gradient", "expand_dims")
