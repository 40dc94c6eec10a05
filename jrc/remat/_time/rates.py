"""What a device computes, reads and writes in a second.

>>> from jrc._targets.chips import CHIPS
>>> rates = rates_of_chip(CHIPS["h100"])
>>> rates.seconds_of_products("f32", 0.8 * 989.4e12), rates.seconds_of_products("bf16", 989.4e12)
(2.0, 1.25)

Of a CPU, whose caches are faster than its memory, a rate may depend on a size:

>>> [round(rate_at({2**20: 80e9, 2**22: 20e9}, size) / 1e9) for size in (2**10, 2**21, 2**30)]
[80, 40, 20]
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jrc._targets import Chip

# The published rate is that of bfloat16. Tensor cores multiply float32 as TF32, at half of it.
_BY_DTYPE = {"f64": 1 / 16, "f32": 1 / 2, "s8": 2.0, "u8": 2.0, "f8e4m3fn": 2.0, "f8e5m2": 2.0}
# How many times faster products are than elementwise functions: assumed, of every accelerator.
_PRODUCTS_OVER_FUNCTIONS = 64
_LAUNCH_SECONDS = 2e-6
# Shares of the published rates, and seconds, with which the kernels of nine programs take about
# what they took on an H100 (benchmarks.device.kernels); assumed of every GPU. Kernels of products
# take a microsecond more than others, and move bytes at half of their rate.
_PRODUCTS_ON_GPUS, _BANDWIDTH_ON_GPUS, _BYTES_OF_PRODUCTS_ON_GPUS = 0.8, 0.9, 0.45
_LAUNCH_ON_GPUS, _LATENCY_OF_PRODUCTS_ON_GPUS = 1.6e-6, 1e-6

Rate = float | Mapping[int, float]
"""Something per second: the same for all sizes, or that of a few sizes."""


def rate_at(rate: Rate, size: float) -> float:
    """Return the rate at a size: between two known ones on a line in logarithms, beyond theirs."""
    if not isinstance(rate, Mapping):
        return rate
    sizes, rates = (np.log([*each]) for each in (rate.keys(), rate.values()))
    return math.exp(np.interp(math.log(max(size, 1)), sizes, rates))


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of one device.

    Attributes:
        products: Floating-point operations per second of matrix products.
        convolutions: The same of convolutions.
        functions: Values per second of an elementwise function such as tanh.
        bandwidth: Bytes per second of its memory; of a CPU by the bytes that a kernel reads and
            writes, with rising sizes: few of them stay in a cache from kernel to kernel.
        launch: Seconds from one kernel to the next.
        bandwidth_of_products: The bandwidth for kernels of products and convolutions; `None` if it
            is that of all.
        latency_of_products: Seconds that such a kernel takes in addition, however small it is.
        new_memory: Bytes per second at which a program gets memory that is new in each run: on a
            CPU the system hands it over page by page, an accelerator keeps it from run to run.
        slow_convolutions: Operations per second of convolutions that are no call of a library. XLA
            for CPUs gives convolutions the form of its library outside of loops alone; inside,
            gradients and images with channels first are computed one value after the other, and
            everywhere depthwise ones, and those of images of three dimensions.
        strided: Entries per second that a loop reads in steps, by the bytes of a cache that
            holds the lines of a column. Kernels of accelerators transpose in tiles: there that
            costs no more than the bytes.
        by_dtype: By HLO's name of a dtype, its rate of products over `products`; 1 of others.
    """

    products: float
    convolutions: float
    functions: float
    bandwidth: Rate
    launch: float
    bandwidth_of_products: float | None = None
    latency_of_products: float = 0.0
    new_memory: float = math.inf
    slow_convolutions: float = math.inf
    strided: Rate = math.inf
    by_dtype: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def seconds_of_products(
        self, dtype: str, flops: float, convolves: bool = False, in_library: bool = True
    ) -> float:
        """Return the seconds of so many operations of products, or of convolutions."""
        rate = self.convolutions if convolves else self.products
        if convolves and not in_library:
            rate = min(rate, self.slow_convolutions)
        return flops / (rate * self.by_dtype.get(dtype, 1.0))

    def seconds_of_bytes(self, size: float, multiplies: bool = False) -> float:
        """Return the seconds in which a kernel, of products or not, moves so many bytes."""
        of_products = self.bandwidth_of_products if multiplies else None
        return size / rate_at(of_products or self.bandwidth, size)

    def seconds_of_strided(self, entries: Mapping[int, int]) -> float:
        """Return the seconds of entries that are read in steps, by the bytes for a column."""
        return sum(count / rate_at(self.strided, size) for size, count in entries.items())


def rates_of_chip(chip: Chip) -> Rates | None:
    """Return the rates of a chip, `None` where they are not all known.

    They are the published ones; of a GPU the share of them that kernels reach.
    """
    products, bandwidth = chip.peak_flops.value, chip.memory_bandwidth.value
    if products is None or bandwidth is None:
        return None
    is_gpu = chip.platform == "gpu"
    if is_gpu:
        products *= _PRODUCTS_ON_GPUS
    return Rates(
        products=products,
        convolutions=products,
        functions=products / _PRODUCTS_OVER_FUNCTIONS,
        bandwidth=_BANDWIDTH_ON_GPUS * bandwidth if is_gpu else bandwidth,
        launch=_LAUNCH_ON_GPUS if is_gpu else _LAUNCH_SECONDS,
        bandwidth_of_products=_BYTES_OF_PRODUCTS_ON_GPUS * bandwidth if is_gpu else None,
        latency_of_products=_LATENCY_OF_PRODUCTS_ON_GPUS if is_gpu else 0.0,
        # A TPU multiplies float32 as bfloat16, unless a precision is asked for.
        by_dtype={} if chip.platform == "tpu" else _BY_DTYPE,
    )
