"""What is published of each accelerator, per JAX device, with the source of every figure.

A JAX device is a chip, but for TPU7x, whose chips are two devices each with half of everything.
Rates are those of one direction: vendors state links in both.
"""

import dataclasses
from collections.abc import Mapping

_GIB = 2**30
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published number.

    Attributes:
        value: The number; `None` if none is published.
        source: Who states it.
    """

    value: float | None
    source: str


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator; all figures are those of one JAX device.

    Attributes:
        name: What it is called in the name of a target: `"v5e"`, `"h100"`.
        title: What its vendor calls it.
        platform: `"tpu"` or `"gpu"`, as JAX's devices say.
        memory_bytes: Bytes of device memory.
        peak_flops: Dense bfloat16 floating-point operations per second.
        memory_bandwidth: Bytes per second of device memory.
        host_bandwidth: Bytes per second to or from the host's memory, one direction.
        copy_bandwidth: Bytes per second that copies to the host's pinned memory reach.
        link_bandwidth: Bytes per second to other devices over all fast links, one direction.
        devices_per_chip: JAX devices of one chip.
        clock: Cycles per second in which the compiler states times; of a TPU.
        on_chip_bytes: Bytes of temporaries that the compiler keeps in on-chip memory, about; they
            are in no peak. Seen in compiled programs.
    """

    name: str
    title: str
    platform: str
    memory_bytes: Figure
    peak_flops: Figure
    memory_bandwidth: Figure
    host_bandwidth: Figure
    copy_bandwidth: Figure
    link_bandwidth: Figure
    devices_per_chip: int = 1
    clock: Figure = dataclasses.field(default_factory=lambda: Figure(None, "not needed"))
    on_chip_bytes: int = 0


_CLOUD = "Google Cloud TPU documentation, page"
_BOOK = "Austin et al., How to Scale Your Model, part 2"
_NVIDIA = "NVIDIA, data sheet of"
_OPENXLA = "OpenXLA, target_config/specs"


# What copies reach of a published rate where nothing was measured.
_REACHED = 0.8


def _modelled(host: float | None) -> Figure:
    """Return what copies to the host are assumed to reach."""
    if host is None:
        return Figure(None, "not published")
    return Figure(_REACHED * host, "modelled: 0.8 of the host's rate")


def _tpu(
    name: str,
    title: str,
    memory: float,
    flops: float,
    bandwidth: float,
    host: float | None,
    link: float,
    per_cycle: int,
    usable: str,
    devices_per_chip: int = 1,
    on_chip: int = 0,
) -> Chip:
    """Return a TPU; the figures are those of a chip, but for `on_chip`, MiB of a device."""
    page = f"{_CLOUD} {name}"
    half = f", half of a chip's {memory:g} GiB" if devices_per_chip > 1 else ""
    n = devices_per_chip
    return Chip(
        name,
        title,
        "tpu",
        Figure(int(memory * _GIB / n), f"{page}{half}; the compiler lets programs use {usable}"),
        Figure(flops / n, page),
        Figure(bandwidth / n, page),
        Figure(host, _BOOK) if host else Figure(None, "not published"),
        _modelled(host),
        Figure(link / n, f"{page}: inter-chip interconnect, one direction"),
        n,
        Figure(flops / n / per_cycle, f"published FLOP/s over {per_cycle} FLOPs a cycle"),
        on_chip * _MIB,
    )


def _gpu(
    name: str,
    title: str,
    memory: int,
    spec: str,
    flops: float,
    bandwidth: float,
    host: tuple[float, str],
    link: tuple[float, str],
) -> Chip:
    sheet = f"{_NVIDIA} {title}"
    return Chip(
        name,
        title,
        "gpu",
        Figure(memory, spec),
        Figure(flops, f"{sheet}: bfloat16 without sparsity"),
        Figure(bandwidth, sheet),
        Figure(host[0], f"{sheet}: {host[1]}, one direction"),
        _MEASURED.get(host) or _modelled(host[0]),
        Figure(link[0], f"{sheet}: {link[1]}, one direction"),
    )


_GEN4 = (32e9, "PCIe Gen4 x16")
_GEN5 = (64e9, "PCIe Gen5 x16")
_C2C = (225e9, "half of a superchip's NVLink-C2C")

# Rates of copies to pinned memory. A GB200's two GPUs share a GH200's link.
_MEASURED = {
    _GEN5: Figure(52e9, "measured with an H100 SXM on this link: 52.4 GB/s to the host, 51.9 back"),
    _C2C: Figure(85e9, "modelled: half of the 170 GB/s that are reported for a GH200"),
}

_ALL = (
    _tpu("v4", "TPU v4", 32, 275e12, 1.2e12, 16e9, 300e9, 262_144, "30.75 GiB",
         on_chip=90),
    _tpu("v5e", "TPU v5e", 16, 197e12, 819e9, 16e9, 200e9, 131_072, "15.75 GiB",
         on_chip=80),
    _tpu("v5p", "TPU v5p", 95, 459e12, 2.765e12, 16e9, 600e9, 262_144, "95.73 GiB"),
    _tpu("v6e", "TPU v6e (Trillium)", 32, 918e12, 1.64e12, 32e9, 400e9, 524_288, "31.24 GiB",
         on_chip=60),
    _tpu("tpu7x", "TPU7x (Ironwood)", 192, 2307e12, 7.38e12, None, 600e9, 524_288, "94.74 GiB", 2,
         on_chip=30),
    _gpu("a100-40", "A100 SXM 40 GB", 42_298_834_944, f"{_OPENXLA}/a100_sxm_40", 312e12, 1.555e12,
         _GEN4, (300e9, "NVLink")),
    _gpu("a100-80", "A100 SXM 80 GB", 85_100_068_864, f"{_OPENXLA}/a100_sxm_80", 312e12, 2.039e12,
         _GEN4, (300e9, "NVLink")),
    _gpu("h100", "H100 SXM 80 GB", 84_942_979_072, f"{_OPENXLA}/h100_sxm", 989.4e12, 3.352e12,
         _GEN5, (450e9, "NVLink")),
    _gpu("h200", "H200 SXM 141 GB", 151_397_597_184, f"{_OPENXLA}/h200", 989.4e12, 4.8e12,
         _GEN5, (450e9, "NVLink")),
    _gpu("b200", "B200 SXM 180 GB", 191_514_411_008, f"{_OPENXLA}/b200", 2250e12, 7.67e12,
         _GEN5, (900e9, "NVLink")),
    _gpu("gb200", "GB200 NVL72, one GPU", 197_897_748_480, f"{_OPENXLA}/gb200", 2500e12, 7.93e12,
         _C2C, (900e9, "NVLink")),
    _gpu("l40s", "L40S 48 GB", 46_068 * 2**20, "NVIDIA's driver: 46,068 MiB with ECC", 362e12,
         864e9, _GEN4, (32e9, "PCIe Gen4 x16, no NVLink")),
)  # fmt: skip

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in _ALL}
"""Every chip by its name."""

TPU_KINDS: Mapping[str, str] = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}
"""The names of chips by what JAX calls their devices."""
