"""The temporaries of a program on an accelerator, from the lifetimes of the values it writes.

The solver counts values that these compilers fuse away: on a CPU its own model is as good.

>>> import jax, jax.numpy as jnp
>>> def loss(w, x):
...     return jnp.sum(jnp.tanh(x @ w) ** 2)
>>> w, x = jnp.ones((16, 16)), jnp.ones((1024, 16))
>>> gradient = jax.make_jaxpr(jax.grad(loss))(w, x)
>>> from jrc.remat._planner.costs.compilers import GPU
>>> peak_of_temporaries(gradient, GPU) // x.nbytes
1
"""

import bisect
import dataclasses
from typing import Any

from jrc._jaxpr import facts_of, inner_programs
from jrc.remat._planner.costs.compilers import Compiler
from jrc.remat._planner.costs.operations import BARRIER, Operations
from jrc.remat._planner.costs.written_values import Kind, WrittenValues
from jrc.remat._planner.settings import SETTINGS

_IN_PLACE = (Kind.ARITHMETIC, Kind.FUNCTION, Kind.MOVE)


def peak_of_temporaries(jaxpr: Any, compiler: Compiler) -> int:
    """Return the bytes of temporaries of a compiled program, as the platform's compiler would.

    Inputs and results are not among them. Results that are not computed yet share their memory
    with values that are no larger.

    Args:
        jaxpr: The program: that of a value and its gradients.
        compiler: What is assumed of the platform's compiler.
    """
    return _Lifetimes(jaxpr, compiler).peak()


class _Lifetimes:
    """When each value that is written lies in memory, in numbers of kernels."""

    def __init__(self, jaxpr: Any, compiler: Compiler) -> None:
        self.compiler = compiler
        self.program = Operations(jaxpr, compiler)
        self.written = WrittenValues(self.program)
        everything = range(len(self.program.list))
        self.kernels = [k for k in everything if self.written.is_written[k]]
        self.at = {k: t for t, k in enumerate(self.kernels)}
        self.same = self._behind_barriers()
        self.last: dict[int, int] = {}
        for v, t in self.written.last_reads(self.at).items():
            place = self._place(v)
            self.last[place] = max(self.last.get(place, 0), t)
        self.read_last: dict[int, list[int]] = {}
        for place in sorted(self.last):
            self.read_last.setdefault(self.last[place], []).append(place)

    def peak(self) -> int:
        """Return the most bytes that lie in memory at one time."""
        results = {self._place(v) for v in self.program.results}
        change = [0] * (len(self.kernels) + 1)
        for each in self._not_shared(self._temporaries(results), results):
            change[each.start] += each.size
            change[each.end + 1] -= each.size
        live = most = 0
        for t, k in enumerate(self.kernels):
            live += change[t]
            most = max(most, live + self._inside(k))
        return most

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

    def _temporaries(self, results: set[int]) -> list["_Lifetime"]:
        """The values that are neither inputs nor results."""
        found: dict[int, _Lifetime] = {}
        for t, k in enumerate(self.kernels):
            free = [found[p] for p in self.read_last.get(t, ()) if p in found]
            for v in self.program.list[k].makes:
                if v in self.same or v in results or v not in self.written.users:
                    continue
                found[v] = _Lifetime(v, self.program.sizes[v], t, self.last.get(v, t))
                if self.written.kinds[k] in _IN_PLACE and k not in self.written.continue_products:
                    self._write_over(found[v], free)
        return list(found.values())

    def _write_over(self, new: "_Lifetime", free: list["_Lifetime"]) -> None:
        """Let arithmetic write over an operand that nothing else reads."""
        old = next((each for each in free if each.size == new.size), None)
        if old is not None:
            free.remove(old)
            old.end = new.start - 1

    def _not_shared(self, temporaries: list["_Lifetime"], results: set[int]) -> list["_Lifetime"]:
        """The temporaries that do not lie in the memory of a result computed after their end.

        Small ones change no peak, and are many: they are counted as they are.
        """
        maker, sizes = self.written.maker, self.program.sizes
        places = sorted(
            (
                _SharedMemory(sizes[v], self.at[maker[v]])
                for v in results
                if maker.get(v) in self.at
            ),
            key=lambda place: (place.size, place.start),
        )
        shared_sizes = [place.size for place in places]
        least = SETTINGS.least_shared * max((each.size for each in temporaries), default=0)

        def is_shared(new: _Lifetime) -> bool:
            first = bisect.bisect_left(shared_sizes, new.size)
            return new.size >= least and any(place.takes(new) for place in places[first:])

        order = sorted(temporaries, key=lambda each: (-each.size, each.start, each.value))
        return [each for each in order if not is_shared(each)]

    def _inside(self, k: int) -> int:
        """The temporaries of the largest program inside of a kernel."""
        operation = self.program.list[k]
        eqn = operation.eqn
        # A kernel that its author wrote (Pallas) has its temporaries on the chip.
        if eqn is None or self.written.kinds[k] is not Kind.KERNEL or not facts_of(eqn).construct:
            return 0
        inner = inner_programs(eqn)
        return max((peak_of_temporaries(each, self.compiler) for each in inner), default=0)


@dataclasses.dataclass
class _Lifetime:
    """A value in memory, from its kernel `start` to its last reader `end`, both included."""

    value: int
    size: int
    start: int
    end: int


@dataclasses.dataclass
class _SharedMemory:
    """The memory of a result before its kernel `start`, and what lies in it."""

    size: int
    start: int
    taken: list[_Lifetime] = dataclasses.field(default_factory=list)

    def takes(self, new: _Lifetime) -> bool:
        """Put a value there if it fits and is gone before the result; return whether it does."""
        if new.size > self.size or new.end >= self.start:
            return False
        if any(old.start <= new.end and new.start <= old.end for old in self.taken):
            return False
        self.taken.append(new)
        return True
