"""A roofline over the kernels of a compiled program: for GPUs and CPUs, which state no seconds.

A kernel takes as long as its products or its functions at the device's rates, as its bytes at the
memory's bandwidth, or as what it reads in steps, whichever is longest, the latency of products if
it has some, and the time to launch it.

Source: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", CACM 52(4), 2009.
"""

from jrc.remat._compiled.hlo import Computation, Instruction, Module
from jrc.remat._time.executed import sum_over_executed
from jrc.remat._time.kernel import Kernel, kernel_of
from jrc.remat._time.rates import Rates

_SMALL_CALL = 'xla_cpu_small_call="true"'


def roofline_seconds(module: Module, rates: Rates) -> float:
    """Return the seconds of one run of a program's kernels.

    Args:
        module: The program.
        rates: The rates of the device.
    """
    inlined = _in_small_calls(module)

    def seconds(around: Computation, each: Instruction) -> float:
        kernel = kernel_of(module, around, each)
        if kernel is None:
            return 0.0
        return kernel_seconds(kernel, rates) + (0.0 if id(around) in inlined else rates.launch)

    return sum_over_executed(module, seconds)


def _in_small_calls(module: Module) -> set[int]:
    """Computations that XLA for CPUs compiles as one function: loops over small arrays."""
    found: set[int] = set()

    def add(each: Instruction) -> None:
        for computation in module.called(each):
            if id(computation) not in found:
                found.add(id(computation))
                for inner in computation.instructions:
                    add(inner)

    for computation in module.computations.values():
        for each in computation.instructions:
            if each.opcode == "call" and _SMALL_CALL in each.attributes:
                add(each)
    return found


def kernel_seconds(kernel: Kernel, rates: Rates) -> float:
    """Return the seconds of one run of a kernel, without its launch."""
    products = sum(
        rates.seconds_of_products(dtype, flops, kernel.convolves, kernel.in_library)
        for dtype, flops in kernel.products.items()
    )
    multiplies = bool(kernel.products)
    longest = max(
        products,
        rates.seconds_of_bytes(kernel.bytes, multiplies),
        rates.seconds_of_strided(kernel.strided),
        kernel.functions / rates.functions,
    )
    return longest + multiplies * rates.latency_of_products
