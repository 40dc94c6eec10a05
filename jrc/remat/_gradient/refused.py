"""What a compiler says of a program that is too large for the device.

The TPU compiler raises instead of returning a program. Two of its texts state a peak; the sizes in
them are in powers of 1024, with three or four digits.
"""

import re

_SIZE = r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)i?B?"
_PEAKS = (
    # After buffers were assigned: "Used 18.24G of 15.75G hbm."
    rf"[Uu]sed {_SIZE} of {_SIZE} hbm",
    # Before: the least that arguments, results and temporaries need at one time.
    rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM",
)
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_IS_SIZE = ("RESOURCE_EXHAUSTED", "Ran out of memory", "OutOfMemory", "Out of memory")


def bytes_in_refusal(text: str) -> int | None:
    """Return the bytes that a program needs, from the error that refused it.

    Args:
        text: The error's text.

    Returns:
        The peak in bytes; `None` if the error is not about memory.

    Raises:
        RuntimeError: If it is about memory and states no peak.

    >>> bytes_in_refusal("Ran out of memory in memory space hbm. Used 1.50G of 1.00G hbm.")
    1610612736
    """
    for pattern in _PEAKS:
        if found := re.search(pattern, text):
            return round(float(found[1]) * 1024 ** _UNITS[found[2]])
    if any(word in text for word in _IS_SIZE):
        raise RuntimeError(
            "jrc: the compiler must say how many bytes a program needs that it refuses, got: "
            f"{' '.join(text.split())[:300]}. Use a smaller batch, or a larger target."
        )
    return None
