"""What a plan minimises: FLOPs, or seconds. The solver sees whole numbers of one unit.

>>> FlopUnit(rate=1e12).of_seconds(2e-6), FlopUnit(rate=1e12).seconds(500)
(2000000, 5e-10)
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Literal

from jrc._jaxpr import (
    equation_cost,
    facts_of,
    has_channels_last,
    is_convolution,
    is_plain_convolution,
    live_cost,
    live_equations,
    own_flops,
    primitive_name,
    stated_cost,
    sums_in_carries,
)
from jrc._tree import is_floating
from jrc.remat._planner.costs.compilers import Compiler
from jrc.remat._time.function_costs import function_cost
from jrc.remat._time.rates import Rates

Minimize = Literal["time", "flops"]
"""What a plan minimises."""

_PER_SECOND = 10**12
# The dtypes of which products have a rate of their own, as HLO calls them.
_HLO_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "int8": "s8",
    "uint8": "u8",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
}


@dataclasses.dataclass(frozen=True)
class FlopUnit:
    """Floating-point operations; bytes cost none.

    Attributes:
        rate: How many of them a program reaches in a second; 0 if that is not known.
    """

    rate: float = 0.0

    @property
    def in_loop(self) -> "FlopUnit":
        """The unit for a program that is the body of a loop: the same."""
        return self

    def of(self, eqn: Any) -> int:
        """Return the FLOPs of one equation, programs inside of it included."""
        return equation_cost(eqn, own_flops)

    def total(self, jaxpr: Any) -> int:
        """Return the FLOPs of all equations of a program that are not dead."""
        return live_cost(live_equations(jaxpr), own_flops)

    def of_bytes(self, size: float) -> int:
        """Return the cost of bytes that a kernel reads or writes: 0."""
        return 0

    def of_written(self, size: float) -> int:
        """Return the cost of bytes that are written by a kernel of their own: 0."""
        return 0

    def of_stacked(self, stacked: Iterable[tuple[Any, int]]) -> int:
        """Return the cost of copying arrays of so many steps into stacks, and out: 0."""
        return 0

    def of_sums(self, entries: int, size: float) -> int:
        """Return the cost of adding up so many entries of gradients: one an entry."""
        return entries

    def of_memory(self, size: float) -> int:
        """Return the cost of temporaries of so many bytes: 0."""
        return 0

    def of_seconds(self, seconds: float) -> int:
        """Return the FLOPs that the device computes in this time."""
        return round(seconds * self.rate)

    def seconds(self, cost: float) -> float:
        """Return the seconds in which it computes so many."""
        return cost / self.rate if self.rate else 0.0


@dataclasses.dataclass(frozen=True)
class TimeUnit:
    """Picoseconds of a device, by a roofline over equations.

    A kernel takes as long as its products, or as its operands and results take to be read and
    written, whichever is longer, and the time to launch it. What a compiler fuses into its readers
    takes the time of its operations alone; a pass that it may fuse with others writes its result.

    Attributes:
        rates: The rates of the device.
        compiler: What is assumed of its compiler.
        is_in_loop: Whether the equations are those of the body of a loop.
    """

    rates: Rates
    compiler: Compiler
    is_in_loop: bool = False

    @functools.cached_property
    def in_loop(self) -> "TimeUnit":
        """The same for the body of a loop."""
        return self if self.is_in_loop else dataclasses.replace(self, is_in_loop=True)

    def of(self, eqn: Any) -> int:
        """Return the picoseconds of one equation."""
        return equation_cost(eqn, self._own, self.in_loop._own)

    def total(self, jaxpr: Any) -> int:
        """Return the picoseconds of a program; sums in carries of loops are read and written."""
        live = live_equations(jaxpr)
        sums = sum(times * self._of_sum(eqn) for eqn, times in sums_in_carries(live))
        return live_cost(live, self._own, self.in_loop._own) + sums

    def of_bytes(self, size: float) -> int:
        """Return the time in which a kernel reads or writes so many bytes."""
        return self.of_seconds(self.rates.seconds_of_bytes(size))

    def of_written(self, size: float) -> int:
        """Return the time in which so many bytes are written, and a kernel is launched."""
        return self.of_seconds(self.rates.seconds_of_bytes(size) + self.rates.launch)

    def of_stacked(self, stacked: Iterable[tuple[Any, int]]) -> int:
        """Return the time in which arrays are written, by a kernel each, and read once more.

        On a CPU that is not counted: its predictions were compared with measured seconds without.

        Args:
            stacked: Types, and how many steps write an array of each.
        """
        if not self.compiler.fuses_passes:
            return 0
        moved = self.compiler.moved_bytes
        return sum(steps * self.of_written(2 * moved(aval)) for aval, steps in stacked)

    def of_sums(self, entries: int, size: float) -> int:
        """Return the time in which two summands are read and a sum is written.

        Where a sum is part of the kernel of a product, that summand is never in memory.
        """
        arrays = 2 if self.compiler.continues_products else 3
        return self.of_bytes(arrays * size)

    def of_memory(self, size: float) -> int:
        """Return the time in which a program is given memory that is new in each run."""
        return self.of_seconds(size / self.rates.new_memory)

    def of_seconds(self, seconds: float) -> int:
        """Return seconds as picoseconds."""
        return round(seconds * _PER_SECOND)

    def seconds(self, cost: float) -> float:
        """Return picoseconds as seconds."""
        return cost / _PER_SECOND

    def _of_sum(self, eqn: Any) -> int:
        """What an addition to a carry takes beside what it takes inside of a pass."""
        aval = eqn.outvars[0].aval
        whole = self.of_sums(aval.size, self.compiler.moved_bytes(aval))
        return max(whole - self.in_loop._own(eqn), 0)

    def _own(self, eqn: Any) -> int:
        is_pass = self.compiler.is_pass(eqn) or self.compiler.fuses(eqn)
        if is_pass and stated_cost(eqn) is None:
            return self.of_seconds(self._of_pass(eqn))
        return self.of_seconds(self._of_kernel(eqn))

    def _of_pass(self, eqn: Any) -> float:
        """Seconds of arithmetic, or of a function, as part of a kernel that goes over the data."""
        seconds = own_flops(eqn) * _function_cost(eqn) / self.rates.functions
        if self.compiler.fuses(eqn):
            return seconds
        return max(seconds, self.rates.seconds_of_bytes(self._moved(eqn.outvars)))

    def _of_kernel(self, eqn: Any) -> float:
        """Seconds of a kernel of its own."""
        written, flops, stated = self._moved(eqn.outvars), own_flops(eqn), stated_cost(eqn)
        if stated is not None:
            moved = stated.bytes_accessed or written + self._moved(eqn.invars)
            computed = self.rates.seconds_of_products("bf16", flops)
        else:
            # What only moves data reads as much of an operand as it writes.
            most = written if facts_of(eqn).moves_data else math.inf
            moved = written + sum(min(self._moved([x]), most) for x in eqn.invars)
            computed = self._computed(eqn, flops)
        multiplies = facts_of(eqn).is_contraction
        seconds = max(computed, self.rates.seconds_of_bytes(moved, multiplies))
        return seconds + multiplies * self.rates.latency_of_products + self.rates.launch

    def _moved(self, atoms: Iterable[Any]) -> float:
        """Bytes that are read or written where some arrays are."""
        return sum(self.compiler.moved_bytes(x.aval) for x in atoms)

    def _computed(self, eqn: Any, flops: int) -> float:
        if not facts_of(eqn).is_contraction:
            return flops * _function_cost(eqn) / self.rates.functions
        operand: Any = eqn.invars[0].aval
        dtype = _HLO_NAMES.get(operand.dtype.name, "")
        convolves = is_convolution(eqn)
        in_library = not convolves or (
            is_plain_convolution(eqn) and (not self.is_in_loop or has_channels_last(eqn))
        )
        return self.rates.seconds_of_products(dtype, flops, convolves, in_library)


def _function_cost(eqn: Any) -> float:
    """How long an operation takes, as multiples of a tanh."""
    is_float = any(is_floating(v.aval) for v in eqn.outvars)
    return function_cost(primitive_name(eqn), is_float)


CostUnit = FlopUnit | TimeUnit

FLOPS = FlopUnit()
