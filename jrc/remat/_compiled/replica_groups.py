"""Which devices take part in a collective, from the text of the compiled program.

XLA numbers devices in the order of the mesh, and writes the groups that exchange in three forms.

>>> groups_of("replica_groups={{0,1},{2,3}}, dimensions={0}", 4)
((0, 1), (2, 3))
>>> groups_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
((0, 2), (1, 3))
>>> groups_of("replica_groups=mesh['a'=2,'b'=2] {'b'}", 4)
((0, 1), (2, 3))
>>> axes_of_groups(((0, 2), (1, 3)), {"data": 2, "model": 2})
('data',)

Source: XLA, `xla/hlo/ir/replica_group.cc` and `mesh_and_axis.cc`, `ToString`.
"""

import re
from collections.abc import Mapping

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?"
_BY_IOTA = re.compile(rf"replica_groups={_IOTA}")
_BY_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\((.*?\)?)\))? ?\{([^}]*)\}"
)


def groups_of(attributes: str, devices: int) -> Groups:
    """Return the groups of devices that exchange, as positions in the mesh.

    Args:
        attributes: The text after a collective's operands.
        devices: Number of devices of the program: where no group is written, all are one.

    Returns:
        The groups; of a permutation its pairs of source and target.
    """
    if found := _BY_MESH.search(attributes):
        return _by_mesh(found[1], found[2] or "", found[3])
    if found := _BY_IOTA.search(attributes):
        shape, reshape, order = map(_numbers, found.groups())
        return _as_groups(_iota(reshape or shape, order).reshape(shape))
    found = _LISTED.search(attributes)
    listed = re.findall(r"\{([\d,]+)\}", found[1]) if found else []
    return tuple(map(_numbers, listed)) or (tuple(range(devices)),)


def axes_of_groups(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a mesh along which the devices of a group differ.

    Args:
        groups: As of `groups_of`.
        sizes: The axes of the mesh with their sizes, in order; empty where none is known.
    """
    count = int(np.prod([*sizes.values()], dtype=int))
    if not sizes or any(i >= count for group in groups for i in group):
        return ()
    places = np.stack(np.unravel_index(np.arange(count), tuple(sizes.values())), axis=1)
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        there = places[list(group)]
        differ |= (there != there[:1]).any(axis=0)
    return tuple(name for name, is_along in zip(sizes, differ, strict=True) if is_along)


def _by_mesh(mesh: str, ids: str, axes: str) -> Groups:
    """Return groups written by XLA's own mesh; an axis may be a part of one: `'a':(2)4`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    shape: list[int] = []
    along: list[int] = []
    wanted = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    for name, size in sizes.items():
        parts = {int(before): int(part) for each, before, part in wanted if each == name and part}
        done = 1
        for before, part in sorted(parts.items()):
            shape += [before // done, part]
            along.append(len(shape) - 1)
            done = before * part
        if not parts and any(each == name for each, _, _ in wanted):
            along.append(len(shape))
        shape.append(size // done)
    order = _device_order(ids, int(np.prod(shape, dtype=int))).reshape(shape)
    width = int(np.prod([shape[i] for i in along], dtype=int))
    others = [i for i in range(len(shape)) if i not in along]
    return _as_groups(order.transpose(*others, *along).reshape(-1, width))


def _device_order(ids: str, count: int) -> np.ndarray:
    """Return the devices of XLA's own mesh, in its order."""
    found = re.search(_IOTA, ids)
    if found:
        shape, reshape, order = map(_numbers, found.groups())
        return _iota(reshape or shape, order).reshape(-1)
    return np.array(_numbers(ids)) if ids else np.arange(count)


def _iota(shape: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return numbers.transpose(order) if order else numbers


def _as_groups(array: np.ndarray) -> Groups:
    return tuple(tuple(map(int, row)) for row in array)


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text or ""))
