"""Descriptions of GPUs for XLA's compiler: its `GpuTargetConfigProto` as text.

With one the compiler needs neither GPU nor driver. The figures are NVIDIA's (data sheets, the CUDA
programming guide's table of compute capabilities) and those that OpenXLA lists for the same devices
in `xla/backends/gpu/target_config/specs`.
"""

import dataclasses
from collections.abc import Mapping

from jrc._targets.chips import CHIPS


@dataclasses.dataclass(frozen=True)
class GpuHardware:
    """What the compiler asks of a GPU.

    Attributes:
        device: The name that its driver gives it.
        capability: Its compute capability, major and minor.
        cores: Streaming multiprocessors.
        units: Single-precision units of each.
        clock_ghz: The clock that boost reaches.
        l2_bytes: Bytes of its second-level cache.
        shared_bytes: Bytes of shared memory of a multiprocessor; a block may use 1 KiB less.
        threads: Threads of a multiprocessor.
    """

    device: str
    capability: tuple[int, int]
    cores: int
    units: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int
    threads: int = 2048


_AMPERE, _HOPPER = 164 * 1024, 228 * 1024
_MIB = 2**20

HARDWARE: Mapping[str, GpuHardware] = {
    "a100-40": GpuHardware("NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 1.41, 40 * _MIB, _AMPERE),
    "a100-80": GpuHardware("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 40 * _MIB, _AMPERE),
    "h100": GpuHardware("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 50 * _MIB, _HOPPER),
    "h200": GpuHardware("NVIDIA H200", (9, 0), 132, 128, 1.98, 50 * _MIB, _HOPPER),
    "b200": GpuHardware("NVIDIA B200", (10, 0), 148, 128, 1.965, 132_644_864, _HOPPER),
    "gb200": GpuHardware("NVIDIA GB200", (10, 0), 152, 128, 2.062, 135_528_448, _HOPPER),
    "l40s": GpuHardware("NVIDIA L40S", (8, 9), 142, 128, 2.52, 96 * _MIB, 100 * 1024, 1536),
}
"""The GPUs that can be asked for."""


def gpu_description(name: str) -> str:
    """Return the text that XLA's compiler takes for a GPU.

    Args:
        name: A key of `HARDWARE`.
    """
    gpu, chip = HARDWARE[name], CHIPS[name]
    major, minor = gpu.capability
    # Instructions of one architecture alone (wgmma, tcgen05): from Hopper on.
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": gpu.shared_bytes,
        "shared_memory_per_block_optin": gpu.shared_bytes - 1024,
        "threads_per_core_limit": gpu.threads,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "memory_bandwidth": int(chip.memory_bandwidth.value or 0),
        "device_memory_size": int(chip.memory_bytes.value or 0),
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_address_bits": 64,
    }
    lines = [f"  {key}: {value}" for key, value in info.items()]
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}",
            f'  name: "{gpu.device}"',
            '  device_vendor: "NVIDIA Corporation"',
            '  driver_version: "13.0.0"',
            '  runtime_version: "12.8.0"',
            '  compile_time_toolkit_version: "12.8.0"',
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 }",
            f'device_description_str: "{gpu.device}"',
        ]
    )
