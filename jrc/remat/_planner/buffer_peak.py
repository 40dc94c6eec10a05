"""The temporaries of a program, from the lifetimes of the values that its compiler writes.

>>> import jax, jax.numpy as jnp
>>> def loss(w, x):
...     return jnp.sum(jnp.tanh(x @ w) ** 2)
>>> w, x = jnp.ones((16, 16)), jnp.ones((1024, 16))
>>> gradient = jax.make_jaxpr(jax.grad(loss))(w, x)
>>> peak_of_temporaries(gradient, memory_on("cpu")) // x.nbytes
2
"""

from collections.abc import Iterable
from typing import Any

from jax.extend.core import Jaxpr

from jrc._jaxpr import inner_programs
from jrc.remat._planner.operations import BARRIER, Operations
from jrc.remat._planner.platform_memory import PlatformMemory, memory_on
from jrc.remat._planner.written_values import Kind, WrittenValues

__all__ = ["memory_on", "peak_of_temporaries"]

_IN_PLACE = (Kind.ARITHMETIC, Kind.FUNCTION, Kind.MOVE)


def peak_of_temporaries(jaxpr: Jaxpr, memory: PlatformMemory) -> int:
    """Return the bytes of temporaries of a compiled program, as the platform's compiler would.

    Inputs and results are not among them. Results that are not computed yet lend their memory to
    values that are no larger.

    Args:
        jaxpr: The program: that of a value and its gradients.
        memory: What is assumed of the platform.
    """
    return _Lifetimes(jaxpr, memory).peak()


class _Lifetimes:
    """When each value that is written lies in memory, in numbers of kernels."""

    def __init__(self, jaxpr: Jaxpr, memory: PlatformMemory) -> None:
        self.memory = memory
        self.program = Operations(jaxpr, memory)
        self.written = WrittenValues(self.program)
        everything = range(len(self.program.list))
        self.kernels = [k for k in everything if self.written.is_written[k]]
        self.reads = {k: self.written.reads(k) for k in self.kernels}
        if memory.starts_early:
            self.kernels = self._as_operands_are_there()
        self.at = {k: t for t, k in enumerate(self.kernels)}
        self.same = self._behind_barriers()
        self.last: dict[int, int] = {}
        for k in self.kernels:
            for v in self.reads[k]:
                place = self._place(v)
                self.last[place] = max(self.last.get(place, 0), self.at[k])

    def peak(self) -> int:
        """Return the most bytes that lie in memory at one time."""
        results = {self._place(v) for v in self.program.results}
        spans = self._spans(results)
        change = [0] * (len(self.kernels) + 1)
        for _, size, start, end in self._not_lent(spans, results):
            change[start] += size
            change[end + 1 if end < len(self.kernels) else end] -= size
        live = most = 0
        for t, k in enumerate(self.kernels):
            live += change[t]
            most = max(most, live + self._inside(k))
        return most

    def _as_operands_are_there(self) -> list[int]:
        """The kernels in the order in which their operands are there, first come, first run."""
        maker = self.written.maker
        waits = {k: {maker[v] for v in self.reads[k] if v in maker} for k in self.kernels}
        readers: dict[int, list[int]] = {}
        for k in self.kernels:
            for made_by in waits[k]:
                readers.setdefault(made_by, []).append(k)
        left = {k: len(waits[k]) for k in self.kernels}
        ready = [k for k in self.kernels if not left[k]]
        for k in ready:  # grows meanwhile
            for reader in readers.get(k, []):
                left[reader] -= 1
                if not left[reader]:
                    ready.append(reader)
        return ready

    def _behind_barriers(self) -> dict[int, int]:
        """For each result of a barrier, the value that it is."""
        same = {}
        for k in self.kernels:
            operation = self.program.list[k]
            if operation.name == BARRIER:
                same |= dict(zip(operation.makes, operation.reads, strict=True))
        return {v: w for v, w in same.items() if v != w and self._is_in_memory(w)}

    def _is_in_memory(self, value: int) -> bool:
        k = self.written.maker.get(value)
        return k is None or self.written.is_written[k]

    def _place(self, value: int) -> int:
        while value in self.same:
            value = self.same[value]
        return value

    def _spans(self, results: set[int]) -> list[tuple[int, int, int, int]]:
        """Each temporary value: its number, bytes, and the first and the last kernel."""
        free: dict[int, list[int]] = {}
        found: dict[int, list[int]] = {}
        sizes = self.program.sizes
        for t, k in enumerate(self.kernels):
            operation = self.program.list[k]
            made = [v for v in operation.makes if v not in self.same]
            dying = {p for v in self.reads[k] if self.last[p := self._place(v)] == t}
            free = {p: found[p] for p in sorted(dying) if p in found and p not in results}
            for v in made:
                if v in results or (v not in self.last and not self.written.users.get(v)):
                    continue
                end = self.last.get(v, t)
                start = t
                if self.written.kinds[k] in _IN_PLACE:
                    # Arithmetic writes over an operand that nothing else reads.
                    old = next((p for p, span in free.items() if span[0] == sizes[v]), None)
                    if old is not None:
                        free.pop(old)
                        found[old][2] = t - 1
                found[v] = [sizes[v], start, end]
        return [(v, *span) for v, span in found.items() if span[2] >= span[1]]

    def _not_lent(
        self, spans: Iterable[tuple[int, int, int, int]], results: set[int]
    ) -> list[tuple[int, int, int, int]]:
        """The temporaries that find no room in a result that is computed behind their end."""
        maker, sizes = self.written.maker, self.program.sizes
        rooms = sorted(
            (
                [sizes[v], self.at[maker[v]], []]
                for v in results
                if v in maker and maker[v] in self.at
            ),
            key=lambda room: (room[0], room[1]),
        )
        left = []
        for span in sorted(spans, key=lambda each: (-each[1], each[2], each[0])):
            if not any(_moves_in(span, room) for room in rooms):
                left.append(span)
        return left

    def _inside(self, k: int) -> int:
        """The temporaries of the largest program inside of a kernel."""
        eqn = self.program.list[k].eqn
        if eqn is None or self.written.kinds[k] is not Kind.KERNEL:
            return 0
        inner = inner_programs(eqn)
        return max((peak_of_temporaries(each, self.memory) for each in inner), default=0)


def _moves_in(span: tuple[int, int, int, int], room: list[Any]) -> bool:
    """Put a value into the memory of a result, if it fits there and is gone before the result."""
    _, size, start, end = span
    bytes_, made, taken = room
    if size > bytes_ or end >= made or any(a <= end and start <= b for a, b in taken):
        return False
    taken.append((start, end))
    return True
