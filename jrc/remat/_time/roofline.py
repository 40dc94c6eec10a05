"""A roofline over the kernels of a compiled program: for GPUs, whose compiler states no seconds.

A kernel takes as long as its products at the published rate, or as its bytes at the memory's
bandwidth, whichever is longer, and the time to launch it.

Source: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", CACM 52(4), 2009.
"""

from jrc._targets import Chip
from jrc.remat._compiled.hlo import Computation, Instruction, Module
from jrc.remat._time.executed import sum_over_executed
from jrc.remat._time.kernel import kernel_of

LAUNCH_SECONDS = 2e-6
"""From one kernel to the next."""

# The published rate is that of bfloat16. Tensor cores multiply float32 as TF32, at half of it.
_RATES = {"f64": 1 / 16, "f32": 1 / 2, "s8": 2.0, "u8": 2.0, "f8e4m3fn": 2.0, "f8e5m2": 2.0}


def roofline_seconds(module: Module, chip: Chip) -> float:
    """Return the seconds of one run of a program's kernels.

    Args:
        module: The program.
        chip: The chip; a rate that is not known counts as infinite.
    """
    peak, bandwidth = chip.peak_flops.value, chip.memory_bandwidth.value

    def seconds(around: Computation, each: Instruction) -> float:
        kernel = kernel_of(module, around, each)
        if kernel is None:
            return 0.0
        products = sum(
            flops / (peak * _RATES.get(dtype, 1.0)) if peak else 0.0
            for dtype, flops in kernel.products.items()
        )
        moved = kernel.bytes / bandwidth if bandwidth else 0.0
        return max(products, moved) + LAUNCH_SECONDS

    return sum_over_executed(module, seconds)
