"""Which values of a program an accelerator's compiler writes, and which readers compute.

A product, a convolution, a loop and the like are kernels of their own: they read from memory and
write to it. Arithmetic is computed inside of its readers, as often as it is read, unless one of
them is a kernel of its own.

On a TPU the kernel of a product or a convolution goes on with the arithmetic that alone reads its
result, such as a bias or a residual connection, and writes what comes out of that.

On a GPU slices of such a result are written right behind it if they take less than it does, so that
it is gone; on other platforms those that kernels alone read.
"""

import enum
from collections.abc import Mapping
from typing import Any

from jrc._jaxpr import Fusion, facts_of
from jrc.remat._planner.costs.operations import BARRIER, COPY, RANDOM_BITS, Operation, Operations

_SLICES = frozenset(("slice", "dynamic_slice"))
_MOVES = frozenset(("broadcast_in_dim", "broadcast_to", "transpose", "copy"))


class Kind(enum.Enum):
    """How a compiler treats an operation."""

    BARRIER = enum.auto()
    KERNEL = enum.auto()
    REDUCTION = enum.auto()
    FUNCTION = enum.auto()
    ARITHMETIC = enum.auto()
    MOVE = enum.auto()
    COPY = enum.auto()


_FUSING = (Kind.ARITHMETIC, Kind.FUNCTION, Kind.MOVE, Kind.REDUCTION, Kind.COPY)
_NEVER_FUSED = (Kind.BARRIER, Kind.KERNEL, Kind.REDUCTION, Kind.COPY)


def kind_of(operation: Operation) -> Kind:
    """Return how a platform's compiler treats an operation."""
    name = operation.name
    own = {BARRIER: Kind.BARRIER, COPY: Kind.COPY}
    if name in own or operation.eqn is None:
        return own[name]
    if len(operation.makes) != 1:
        return Kind.KERNEL
    if name == RANDOM_BITS and _is_threefry(operation.eqn):
        return Kind.FUNCTION
    facts = facts_of(operation.eqn)
    if facts.is_reduction:
        return Kind.REDUCTION
    if facts.is_gathering:
        return Kind.MOVE
    if facts.fusion is Fusion.NONE or facts.is_cumulative:
        return Kind.KERNEL
    is_function = facts.fusion is Fusion.LOOP and name != "rsqrt"
    return Kind.FUNCTION if is_function else Kind.ARITHMETIC


class WrittenValues:
    """The operations that write, and when what they read is there and is read for the last time.

    An operation that does not write is computed inside of its readers: what it reads, they read.

    Attributes:
        kinds: How the compiler treats each operation.
        is_written: Whether each operation writes its results.
        continue_products: The operations at the end of a product's kernel, which write its result.
    """

    def __init__(self, program: Operations) -> None:
        self.program, self.compiler = program, program.compiler
        self.kinds = [kind_of(operation) for operation in program.list]
        self.maker = {v: k for k, each in enumerate(program.list) for v in each.makes}
        self.users: dict[int, list[int]] = {}
        for k, operation in enumerate(program.list):
            for v in dict.fromkeys(operation.reads):
                self.users.setdefault(v, []).append(k)
        self.is_written = self._written()
        self.continue_products: set[int] = set()
        if self.compiler.continues_products:
            self._continue_products()
        self._write_slices()

    def last_reads(self, at: Mapping[int, int]) -> dict[int, int]:
        """Return for each value in memory the time of the last operation that reads it.

        Directly, or through what it computes. Each operand of each operation is looked at once: a
        set of what each operation reads would grow with every step of a chain.

        Args:
            at: The times of the operations that write.
        """
        last: dict[int, int] = {}
        for k in range(len(self.program.list) - 1, -1, -1):
            operation = self.program.list[k]
            time = at[k] if self.is_written[k] else last.pop(operation.makes[0])
            for v in operation.reads:
                last[v] = max(last.get(v, time), time)
        return last

    def _written(self) -> list[bool]:
        operations = self.program.list
        results = set(self.program.results)
        written = [True] * len(operations)
        for k in range(len(operations) - 1, -1, -1):
            if self.kinds[k] not in _NEVER_FUSED and results.isdisjoint(operations[k].makes):
                users = self.users.get(operations[k].makes[0], [])
                written[k] = not users or not all(map(self._takes_along, users))
        return written

    def _continue_products(self) -> None:
        """Let the arithmetic that alone reads a product be written in the product's place.

        Arithmetic that reads several products is computed behind the last.
        """
        results = set(self.program.results)
        taken: set[int] = set()
        for k in range(len(self.program.list) - 1, -1, -1):
            operation = self.program.list[k]
            if not _is_product(operation) or len(operation.makes) != 1:
                continue
            end = k
            while results.isdisjoint(self.program.list[end].makes):
                user = self._only_arithmetic(end)
                if user is None or user in taken:
                    break
                taken.add(user)
                end = user
            if end != k:
                self.is_written[k], self.is_written[end] = False, True
                self.continue_products.add(end)

    def _write_slices(self) -> None:
        """Write slices at once that take less than what they are cut from, and free it."""
        for maker in [k for k, is_written in enumerate(self.is_written) if is_written]:
            for whole in self.program.list[maker].makes:
                slices = [
                    k
                    for k in self.users.get(whole, ())
                    if self.program.list[k].name in _SLICES and not self.is_written[k]
                ]
                size = self.program.sizes[whole]
                if sum(self.program.sizes[self.program.list[k].makes[0]] for k in slices) >= size:
                    continue
                for k in slices:
                    early = self.compiler.slices_early or self._is_read_by_kernels(k, size)
                    self.is_written[k] = early

    def _is_read_by_kernels(self, k: int, size: int) -> bool:
        """Whether kernels alone read a result, as it is or moved to less than this many bytes."""
        (value,) = self.program.list[k].makes
        return self.program.sizes[value] < size and all(
            self.kinds[u] is Kind.KERNEL
            or (self.program.list[u].name in _MOVES and self._is_read_by_kernels(u, size))
            for u in self.users.get(value, ())
        )

    def _only_arithmetic(self, k: int) -> int | None:
        """The one reader of a result, if it is arithmetic on each of its entries."""
        (value,) = self.program.list[k].makes
        users = self.users.get(value, [])
        if len(users) != 1 or self.kinds[users[0]] not in (Kind.ARITHMETIC, Kind.FUNCTION):
            return None
        (result,) = self.program.list[users[0]].makes
        return users[0] if self.program.shapes[result] == self.program.shapes[value] else None

    def _takes_along(self, k: int) -> bool:
        """Whether an operation computes its operands in its own kernel."""
        if self.kinds[k] in _FUSING:
            return True
        return self.compiler.computes_operands and _is_product(self.program.list[k])


def _is_threefry(bits: Any) -> bool:
    """Whether random bits are arithmetic, which readers compute; other generators are kernels."""
    return "fry" in str(bits.invars[0].aval.dtype)


def _is_product(operation: Operation) -> bool:
    return operation.eqn is not None and facts_of(operation.eqn).is_contraction
