"""Names of targets: a chip and how many of it, `"v5e:2x2"`, `"h100:8x2"`.

>>> parsed("v5e:2x4").dims, parsed("h100:8x2").dims, parsed("v5e").name
((2, 4), (8, 2), 'v5e:1')
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from jrc._errors import close_to
from jrc._targets.chips import CHIPS, Chip

# Slices of one chip's width and up to a cube, as Google's pages of each TPU list them.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_BELOW_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_ONE = ((1, 1, 1),)
# The largest slice in chips: above a cube all sides are multiples of four, in ascending order.
_MOST_CHIPS = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}
_SIDES = range(4, 65, 4)
# Devices of a node: a board of GPUs has eight at most, an NVL72 rack is one domain of NVLink.
_MOST_IN_A_NODE = {"gb200": 72}
_GPUS_IN_A_NODE, _NODES = 8, 1024
_SHOWN = 14


@dataclasses.dataclass(frozen=True)
class ParsedName:
    """A name that was understood.

    Attributes:
        name: The name in its usual form.
        chip: What it is made of.
        dims: Chips along each axis of a TPU slice; of GPUs devices in a node, and nodes.
    """

    name: str
    chip: Chip
    dims: tuple[int, ...]


def parsed(name: str) -> ParsedName:
    """Return what the name of a target means.

    Args:
        name: A chip, and behind a colon its shape: `"v5e:4x4"`, `"h100:8"`; one without.

    Raises:
        ValueError: If there is no such chip or shape; the error lists those that there are.
    """
    kind, colon, size = name.strip().lower().partition(":")
    chip = CHIPS.get(kind)
    if chip is None:
        raise ValueError(
            f"name must begin with one of {', '.join(CHIPS)}, got {name!r}"
            f"{close_to(kind, CHIPS)}. Write for instance 'v5e:2x2' or 'h100:8'; jrc.targets() "
            "prints all."
        )
    dims = tuple(map(int, size.split("x"))) if re.fullmatch(r"\d{1,6}(x\d{1,6})*", size) else ()
    read = _gpus if chip.platform == "gpu" else _slice
    found = read(chip, (1,) if not colon else dims)
    if found is None:
        example = "8" if chip.platform == "gpu" else _text(shapes_of(kind)[1])
        raise ValueError(
            f"name must have {rule_of(chip)}, got {name!r}. Write for instance '{kind}:{example}'."
        )
    return ParsedName(_usual(chip, found), chip, found)


def rule_of(chip: Chip) -> str:
    """Return in words which shapes there are of a chip."""
    if chip.platform == "gpu":
        most = _MOST_IN_A_NODE.get(chip.name, _GPUS_IN_A_NODE)
        return f"1 to {most} devices in a node, ':8', and up to {_NODES} nodes, ':8x2'"
    known = shapes_of(chip.name)
    text = ", ".join(_text(dims) for dims in known[:_SHOWN])
    if len(known) <= _SHOWN:
        return f"one of the slices {text}"
    most = _MOST_CHIPS[chip.name]
    return (
        f"one of the slices {text}, or any AxBxC of multiples of 4 with A <= B <= C and at most "
        f"{most:,} chips"
    )


def shapes_of(kind: str) -> Sequence[tuple[int, ...]]:
    """Return every slice shape of a TPU, the smallest first."""
    if kind not in _MOST_CHIPS:
        return _FLAT
    cubes = (
        dims
        for dims in itertools.combinations_with_replacement(_SIDES, 3)
        if math.prod(dims) <= _MOST_CHIPS[kind]
    )
    single = () if kind == "v4" else _ONE
    return (*single, *_BELOW_A_CUBE, *sorted(cubes, key=lambda dims: (math.prod(dims), dims)))


def _slice(chip: Chip, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of a slice; a number of chips will do where it has one shape."""
    known = shapes_of(chip.name)
    if len(dims) == 1:
        # Cloud's "v5p-8" counts TensorCores: with three axes only one chip is clear.
        same = [each for each in known if math.prod(each) == dims[0]]
        return same[0] if len(same) == 1 and (len(same[0]) == 2 or dims == (1,)) else None
    return dims if dims in known else None


def _gpus(chip: Chip, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    most = _MOST_IN_A_NODE.get(chip.name, _GPUS_IN_A_NODE)
    if len(dims) not in (1, 2) or not 1 <= dims[0] <= most:
        return None
    nodes = dims[1] if len(dims) == 2 else 1
    return (dims[0], nodes) if 1 <= nodes <= _NODES else None


def _usual(chip: Chip, dims: tuple[int, ...]) -> str:
    if chip.platform == "gpu":
        count = f":{dims[0]}x{dims[1]}" if dims[1] > 1 else f":{dims[0]}" if dims[0] > 1 else ""
        return f"{chip.name}{count}"
    return f"{chip.name}:{'1' if math.prod(dims) == 1 else _text(dims)}"


def _text(dims: Sequence[int]) -> str:
    return "x".join(map(str, dims))
