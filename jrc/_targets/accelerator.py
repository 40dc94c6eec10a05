"""`jrc.target`: an accelerator that need not be there, and `jrc.targets`: which there are."""

import dataclasses
import math
import textwrap
from typing import Any

from jrc._errors import public
from jrc._targets.chips import CHIPS, TPU_KINDS, Chip, Figure
from jrc._targets.compile_only import compile_only_devices
from jrc._targets.gpu_description import HARDWARE
from jrc._targets.names import ParsedName, parsed, rule_of
from jrc._text import TEXT_WIDTH, memory_text, table_text

_FIGURES = {
    "memory_bytes": "B",
    "peak_flops": "FLOP/s",
    "memory_bandwidth": "B/s",
    "host_bandwidth": "B/s",
    "copy_bandwidth": "B/s",
    "link_bandwidth": "B/s",
}
_BUDGET_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Target:
    """An accelerator, or several, that programs are compiled for; prints as a table.

    All figures are published ones, of one device; `figures` has the source of each.

    Attributes:
        name: Its name: `"v5e:2x2"`, `"h100:8"`.
        chip: What is published of its chips.
        dims: Chips along each axis of a TPU slice; of GPUs devices in a node, and nodes.
    """

    name: str
    chip: Chip
    dims: tuple[int, ...]

    @property
    def platform(self) -> str:
        """`"tpu"` or `"gpu"`, as JAX's devices say."""
        return self.chip.platform

    @property
    def device_count(self) -> int:
        """Number of JAX devices."""
        return math.prod(self.dims) * self.chip.devices_per_chip

    @property
    @public("jrc.Target.devices")
    def devices(self) -> tuple[Any, ...]:
        """The devices, for `jax.make_mesh(shape, axes, devices=target.devices)`.

        Programs are compiled for them, and nothing runs on them. The same name has the same
        devices in one process.

        Raises:
            ImportError: If the platform's compiler is not installed.
            RuntimeError: If it does not start.
        """
        named = ParsedName(self.name, self.chip, self.dims)
        return compile_only_devices(named)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of one device."""
        return int(self.chip.memory_bytes.value or 0)

    @property
    def peak_flops(self) -> float | None:
        """Dense bfloat16 floating-point operations per second of one device."""
        return self.chip.peak_flops.value

    @property
    def memory_bandwidth(self) -> float | None:
        """Bytes per second of one device's memory."""
        return self.chip.memory_bandwidth.value

    @property
    def host_bandwidth(self) -> float | None:
        """Bytes per second between a device and its host, one direction; `None` if unknown."""
        return self.chip.host_bandwidth.value

    @property
    def copy_bandwidth(self) -> float | None:
        """Bytes per second that copies to and from pinned host memory reach; `None` if unknown.

        Measured where a measurement is known, else modelled: `figures` says which.
        """
        return self.chip.copy_bandwidth.value

    @property
    def link_bandwidth(self) -> float | None:
        """Bytes per second from one device to others over its fast links."""
        return self.chip.link_bandwidth.value

    @property
    def budget(self) -> int:
        """Nine tenths of a device's memory, in bytes: the budget where none is given."""
        return int(_BUDGET_SHARE * self.memory_bytes)

    @property
    def figures(self) -> dict[str, Figure]:
        """Every figure of one device with its source."""
        return {name: getattr(self.chip, name) for name in _FIGURES}

    def __str__(self) -> str:
        """The figures of one device, with their sources."""
        rows = [
            (name, each.source, _number(each.value, _FIGURES[name]))
            for name, each in self.figures.items()
        ]
        devices = f"{self.device_count} device{'s' if self.device_count > 1 else ''}"
        head = f"{self.name}: {devices} of {self.chip.title}; each has"
        return f"{head}\n{table_text(('', 'source', ''), rows)}"


@dataclasses.dataclass(frozen=True)
class Targets:
    """The accelerators that may be asked for; prints as a table.

    Attributes:
        chips: Each chip with its figures, by name.
    """

    chips: dict[str, Chip]

    def __str__(self) -> str:
        """One row for each chip, and how its slices and nodes are written."""
        rows = [
            (
                chip.name,
                chip.title,
                memory_text(chip.memory_bytes.value or 0),
                "?" if (peak := chip.peak_flops.value) is None else f"{peak / 1e12:.4g}",
                *(
                    _number(figure.value, unit)
                    for figure, unit in (
                        (chip.memory_bandwidth, "B/s"),
                        (chip.host_bandwidth, "B/s"),
                        (chip.link_bandwidth, "B/s"),
                    )
                ),
            )
            for chip in self.chips.values()
        ]
        heads = ("name", "one device", "memory", "bfloat16 TFLOP/s", "bandwidth", "host", "links")
        shapes: dict[str, list[str]] = {}
        for chip in self.chips.values():
            shapes.setdefault(rule_of(chip), []).append(chip.name)
        lines = [
            textwrap.fill(
                f"{', '.join(names)}: {rule}",
                TEXT_WIDTH,
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
            for rule, names in shapes.items()
        ]
        return "\n".join([table_text(heads, rows), *lines])


@public("jrc.target")
def target(name: str) -> Target:
    """Return an accelerator by its name; it need not be there, nor its compiler.

    Args:
        name: A chip, and behind a colon how many: slices of TPUs by their shape in chips
            (`"v5e:2x2"`, `"v5p:4x4x4"`, `"v6e:1"`), GPUs by the devices of a node and the nodes
            (`"h100"`, `"h100:8"`, `"h100:8x2"`). `jrc.targets()` prints all.

    Returns:
        The target. `jrc.plan`, `jrc.explain` and `jrc.largest_batch` take it, or its name, as
        `target=`.

    Raises:
        TypeError: If `name` is no text.
        ValueError: If there is no such chip, or no such shape of it.

    Example:
        >>> v5e = jrc.target("v5e:2x2")
        >>> v5e.platform, v5e.device_count, v5e.memory_bytes == 16 * 2**30
        ('tpu', 4, True)

    Source: `jax.experimental.topologies`; each figure names its own.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"name must be text, got {type(name).__name__}. Write jrc.target('v5e:2x2')."
        )
    found = parsed(name)
    return Target(found.name, found.chip, found.dims)


def link_bandwidth_of(name: str) -> float | None:
    """Return the link bandwidth of a target's name; `None` of any other name, or if unknown."""
    chip = chip_named(name)
    return chip.link_bandwidth.value if chip else None


def chip_named(name: str) -> Chip | None:
    """Return the chip of a target's name; `None` of any other name."""
    try:
        return target(name).chip
    except ValueError:
        return None


def chip_of_device(device: Any) -> Chip | None:
    """Return the chip that a JAX device is; `None` if it is none of those that are known."""
    kinds = {**TPU_KINDS, **{gpu.device: name for name, gpu in HARDWARE.items()}}
    return CHIPS.get(kinds.get(device.device_kind, ""))


def targets() -> Targets:
    """Return the accelerators that may be asked for, with what is published of each.

    Returns:
        Every chip with its figures; `str()` is a table, with the shapes that each comes in.

    Example:
        >>> sorted(jrc.targets().chips)[:3]
        ['a100-40', 'a100-80', 'b200']

    Source: each figure names its own; see `jrc.target(name).figures`.
    """
    return Targets(dict(CHIPS))


def _number(value: float | None, unit: str) -> str:
    """Return a figure as its vendor writes it, in powers of 1000; bytes of memory excepted."""
    if value is None:
        return "?"
    if unit == "B":
        return memory_text(value)
    for size, prefix in ((1e12, "T"), (1e9, "G")):
        if value >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
