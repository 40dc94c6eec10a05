"""Which values of a program its compiler writes to memory, and which it computes inside of readers.

A product, a convolution, a loop and the like are kernels of their own: they read from memory and
write to it. Arithmetic is computed inside of its readers, as often as it is read, unless one of
them is a kernel of its own. A function such as `exp` is computed once where the platform has no
cheap one, so that it is written if it has several readers.

On a CPU a sum over an axis is a call of a library, and takes arithmetic along only where nothing
else reads it: other values that it reads are written. The library also continues a product or a
convolution with the arithmetic that follows; a broadcast that this reads, and something else does
too, is written in full. An operand that it reads with several axes as one is the value itself where
that is written; where it is not, it is computed again for this operand, as for each copy in
another order.

On a TPU the kernel of a product or a convolution goes on with the arithmetic that alone reads its
result, such as a bias or a residual connection, and writes what comes out of that.

On a GPU slices of such a result are written right behind it if they take less than it does, so that
it is gone; on other platforms those that kernels alone read.
"""

import enum
from collections.abc import Mapping, Sequence

from jrc._jaxpr import Fusion, facts_of, operand_axes, reduced_axes
from jrc.remat._planner.costs.operations import (
    BARRIER,
    BROADCAST,
    COPY,
    MERGED,
    RANDOM_BITS,
    Operation,
    Operations,
)
from jrc.remat._planner.costs.platform_memory import PlatformMemory, is_threefry

# What the CPU's library computes behind a product, in one call with it.
_CONTINUED = frozenset("mul add sub neg div add_any integer_pow square max min copy".split())
_SLICES = frozenset(("slice", "dynamic_slice"))
_MOVES = frozenset(("broadcast_in_dim", "broadcast_to", "transpose", "copy"))
_STEPS = 6
"""How many operations a library call continues."""


class Kind(enum.Enum):
    """How a compiler treats an operation."""

    BARRIER = enum.auto()
    KERNEL = enum.auto()
    REDUCTION = enum.auto()
    FUNCTION = enum.auto()
    ARITHMETIC = enum.auto()
    MOVE = enum.auto()
    COPY = enum.auto()
    MERGED = enum.auto()


_FUSING = (Kind.ARITHMETIC, Kind.FUNCTION, Kind.MOVE, Kind.REDUCTION, Kind.COPY, Kind.MERGED)
_NEVER_FUSED = (Kind.BARRIER, Kind.KERNEL, Kind.REDUCTION, Kind.COPY, Kind.MERGED)


def kind_of(operation: Operation, memory: PlatformMemory) -> Kind:
    """Return how a platform's compiler treats an operation."""
    name = operation.name
    own = {
        BARRIER: Kind.BARRIER,
        COPY: Kind.COPY,
        BROADCAST: Kind.ARITHMETIC,
        MERGED: Kind.MERGED,
    }
    if name in own or operation.eqn is None:
        return own[name]
    if len(operation.makes) != 1:
        return Kind.KERNEL
    if name == RANDOM_BITS and not memory.random_words and is_threefry(operation.eqn):
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
        self.program, self.memory = program, program.memory
        self.kinds = [kind_of(operation, self.memory) for operation in program.list]
        self.maker = {v: k for k, each in enumerate(program.list) for v in each.makes}
        self.users: dict[int, list[int]] = {}
        for k, operation in enumerate(program.list):
            for v in dict.fromkeys(operation.reads):
                self.users.setdefault(v, []).append(k)
        self.is_written = self._written()
        self.continue_products: set[int] = set()
        if self.memory.continues_products:
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

    def order_as_ready(self) -> list[int]:
        """Return the operations that write, in the order in which what they read is there.

        Those that a result makes ready follow in program order.
        """
        operations = self.program.list
        left = [sum(v in self.maker for v in dict.fromkeys(each.reads)) for each in operations]
        order = self._ready([k for k, waits in enumerate(left) if not waits], left)
        for k in order:  # grows meanwhile
            order += self._ready(self._served(operations[k].makes, left), left)
        return order

    def _ready(self, served: list[int], left: list[int]) -> list[int]:
        """Those of operations without a wait that write, and those behind the others."""
        found = []
        for k in served:  # grows meanwhile
            if self.is_written[k]:
                found.append(k)
            else:
                served += self._served(self.program.list[k].makes, left)
        return sorted(found)

    def _served(self, values: Sequence[int], left: list[int]) -> list[int]:
        """The operations that wait for nothing else than these values, which are now there."""
        found = []
        for k in (k for v in values for k in self.users.get(v, ())):
            left[k] -= 1
            if not left[k]:
                found.append(k)
        return found

    def _written(self) -> list[bool]:
        operations = self.program.list
        results = set(self.program.results)
        written = [True] * len(operations)
        call: dict[int, int] = {}  # the reduction whose library call an operation is part of
        for k in range(len(operations) - 1, -1, -1):
            if self.kinds[k] in _NEVER_FUSED or not results.isdisjoint(operations[k].makes):
                continue
            (value,) = operations[k].makes
            written[k] = not self._is_fused(k, self.users.get(value, []), call)
            if self.memory.writes_broadcasts and operations[k].name == BROADCAST:
                written[k] = written[k] or self._is_read_by_a_call(k)
        for k, kind in enumerate(self.kinds):
            if kind is Kind.MERGED:
                maker = self.maker.get(operations[k].reads[0])
                written[k] = maker is not None and not written[maker]
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
                    early = self.memory.slices_early or self._is_read_by_kernels(k, size)
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

    def _is_fused(self, k: int, users: Sequence[int], call: dict[int, int]) -> bool:
        if not users or not all(map(self._takes_along, users)):
            return False
        is_function = self.kinds[k] is Kind.FUNCTION
        if is_function and len(users) > 1 and not self.memory.repeats_functions:
            return False
        if self.memory.writes_broadcasts:
            calls = {u if self.kinds[u] is Kind.REDUCTION else call.get(u, -1) for u in users}
            if calls == {-1}:
                return True
            if len(calls) == 1:
                (call[k],) = calls
                return True
            # A constant or a broadcast is made again for each.
            return not self.program.list[k].reads or self.program.list[k].name == BROADCAST
        return True

    def _takes_along(self, k: int) -> bool:
        """Whether an operation computes its operands in its own kernel."""
        if self.kinds[k] in _FUSING:
            return True
        return self.memory.computes_operands and _is_product(self.program.list[k])

    def _is_read_by_a_call(self, k: int) -> bool:
        """Whether a broadcast with several readers is read by what continues a product."""
        (value,) = self.program.list[k].makes
        users = self.users.get(value, [])
        if len(users) < 2:
            return False
        products = self._is_reduced(self.program.list[k].reads[0], _STEPS)
        return any(
            self.program.list[u].name in _CONTINUED and self._continues(u, products, _STEPS)
            for u in users
        )

    def _is_reduced(self, value: int, steps: int) -> bool:
        """Whether a value is computed from the result of a reduction."""
        k = self.maker.get(value)
        if k is None or not steps:
            return False
        if self.kinds[k] is Kind.REDUCTION:
            return True
        if self.kinds[k] not in (Kind.ARITHMETIC, Kind.FUNCTION, Kind.COPY):
            return False
        return any(self._is_reduced(v, steps - 1) for v in self.program.list[k].reads)

    def _continues(self, k: int, products: bool, steps: int) -> bool:
        """Whether an operation follows a convolution, or with `products` a product, in one call."""
        operation = self.program.list[k]
        if operation.name == "conv_general_dilated":
            return True
        if operation.name == "dot_general":
            return products and _keeps_its_shape(operation)
        if not steps or operation.name not in _CONTINUED:
            return False
        return any(
            self._continues(self.maker[v], products, steps - 1)
            for v in operation.reads
            if v in self.maker and all(map(self._may_continue, self.users[v]))
        )

    def _may_continue(self, k: int) -> bool:
        operation = self.program.list[k]
        if self.kinds[k] is not Kind.REDUCTION:
            return operation.name in _CONTINUED
        axes = reduced_axes(operation.eqn) if operation.eqn is not None else ()
        return len(self.program.shapes[operation.reads[0]]) - 1 in axes


def _is_product(operation: Operation) -> bool:
    return operation.eqn is not None and facts_of(operation.eqn).is_contraction


def _keeps_its_shape(product: Operation) -> bool:
    """Whether a library multiplies without a reshape: one free axis for each operand."""
    return all(len(operand_axes(product.eqn, i).free) == 1 for i in range(2))
