"""How fast a device copies to the memory of its host."""

from collections.abc import Iterable
from typing import Any

from jrc._targets import Target, chip_of_device
from jrc._validate import is_real
from jrc.remat._gradient.compiled_memory import device_of


def copy_bandwidth_of(
    offload: bool | int | float, target: Target | None, arrays: Iterable[Any]
) -> float | None:
    """Return the bytes per second of copies to the host; `None` if values may not be moved there.

    Copies back run at the same rate beside.

    Args:
        offload: Whether they may be; or the bytes per second that copies reach.
        target: The target.
        arrays: Without one, arrays on the device, or shapes with shardings.

    Raises:
        TypeError: If `offload` is neither a bool nor a number.
        ValueError: If it is no rate, the device is a CPU, or nothing is known of it.
    """
    check_offload(offload)
    if offload is False:
        return None
    device = None if target else device_of(arrays)
    if device is not None and device.platform == "cpu":
        raise ValueError(
            "offload must be used with an accelerator, got a CPU, whose pinned host memory "
            "is its own memory: nothing would move. Name the accelerator that the program is for: "
            "target='h100', or for a train step a mesh of jrc.target('h100').devices."
        )
    chip = target.chip if target else chip_of_device(device)
    flops = chip.peak_flops.value if chip else None
    rate = (chip.copy_bandwidth.value if chip else None) if offload is True else offload
    if flops is None or rate is None:
        what = target.name if target else device.device_kind  # type: ignore[union-attr]
        remedy = (
            "Pass what copies reach there, in bytes per second: offload=25e9."
            if flops
            else "Name the accelerator: target='h100'."
        )
        raise ValueError(
            "offload must be used with an accelerator whose rates are known, got "
            f"{what!r}. {remedy}"
        )
    return float(rate)


def check_offload(offload: Any) -> None:
    """Raise unless this is a bool or a rate.

    Raises:
        TypeError: If it is neither a bool nor a number.
        ValueError: If it is a number that is no rate.
    """
    if isinstance(offload, bool):
        return
    if not is_real(offload):
        raise TypeError(
            "offload must be a bool, or the bytes per second of copies to the host, got "
            f"{type(offload).__name__}. Write offload=True."
        )
    if not 0 < offload < float("inf"):
        raise ValueError(
            f"offload must be a positive number of bytes per second, got {offload!r}. Write "
            "offload=25e9, or offload=True for what is known of the accelerator."
        )
