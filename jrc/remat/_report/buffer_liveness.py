"""Live bytes along a compiled program's schedule.

Every instruction makes buffers, and a buffer is freed behind its last reader. What renames or
regroups buffers makes none, a loop's state stays where it is, and an elementwise operator writes
over an operand that nobody else will read, as in XLA's own assignment of buffers.

>>> from jrc.remat._report.hlo import read
>>> live_bytes(read('''
... ENTRY %main (x: f32[4]) -> f32[4] {
...   %x = f32[4]{0} parameter(0)
...   %y = f32[8]{0} custom-call(%x)
...   ROOT %z = f32[4]{0} custom-call(%y)
... }
... '''))
[0, 32, 48]
"""

import dataclasses
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

from jrc.remat._report.hlo import Computation, Instruction, Module

_SAME = frozenset({"bitcast", "optimization-barrier", "copy-done", "add-dependency", "domain"})
_REGROUP = frozenset({"tuple", "get-tuple-element", *_SAME})
_GIVEN = frozenset({"parameter", "constant", "partition-id", "replica-id", "after-all"})
_WITH_INSIDE = frozenset({"while", "conditional", "call", "async-start"})
# Where an operand may be written over, although the operator is not elementwise.
_IN_PLACE = frozenset({"dynamic-update-slice", "scatter", "sort", "all-reduce"})
_NOT_ELEMENTWISE = frozenset(
    "broadcast reshape transpose slice dynamic-slice gather pad concatenate reverse iota reduce "
    "dot convolution reduce-window select-and-scatter fft triangular-solve cholesky custom-call "
    "rng rng-bit-generator conditional call copy copy-start all-gather all-to-all reduce-scatter "
    "collective-permute topk async-start dynamic-reshape".split()
)


def live_bytes(module: Module) -> list[int]:
    """Bytes of temporaries and results while each instruction of the program runs."""
    return _Schedule(module).curve(module.entry, "entry")


@dataclasses.dataclass
class _Buffer:
    """Bytes, the first and the last instruction that need them, and who counts them."""

    size: int
    start: int
    last: int
    is_given: bool
    over: "_Buffer | None" = None

    @property
    def whole(self) -> "_Buffer":
        """The buffer that this one was written over, if there is one."""
        return self if self.over is None else self.over.whole


class _Schedule:
    """The computations of a program, each looked at once."""

    def __init__(self, module: Module):
        self.module = module
        self.peaks: dict[str, int] = {}

    def curve(self, computation: Computation, role: str) -> list[int]:
        """Live bytes at each instruction; only those that the computation makes for itself."""
        buffers, values = _made(computation, role)
        _write_over(self.module, computation, buffers, values, role)
        if role != "entry":
            # The caller has room for what is returned.
            for buffer in _leaves(values[computation.root.name]):
                buffer.whole.is_given = True
        end = len(computation.instructions)
        changes = [0] * (end + 1)
        for buffer in buffers:
            if buffer.over is None and not buffer.is_given:
                changes[buffer.start] += buffer.size
                changes[min(buffer.last, end - 1) + 1] -= buffer.size
        inside = map(self._inside, computation.instructions)
        return [level + more for level, more in zip(accumulate(changes[:end]), inside, strict=True)]

    def _inside(self, each: Instruction) -> int:
        """The most that an instruction's own computations need at once."""
        names = each.call_checked.values() if each.opcode in _WITH_INSIDE else ()
        known = (n for group in names for n in group if n in self.module.computations)
        return max((self._peak(name, each.opcode) for name in known), default=0)

    def _peak(self, name: str, role: str) -> int:
        if name not in self.peaks:
            self.peaks[name] = max(self.curve(self.module.computations[name], role), default=0)
        return self.peaks[name]


def _made(computation: Computation, role: str) -> tuple[list[_Buffer], dict[str, Any]]:
    """All buffers, and of each instruction those of its result, in the result's shape."""
    buffers: list[_Buffer] = []
    values: dict[str, Any] = {}

    def new(shape: Any, i: int, is_given: bool) -> Any:
        if isinstance(shape, tuple):
            return tuple(new(part, i, is_given) for part in shape)
        buffers.append(_Buffer(shape, i, i, is_given))
        return buffers[-1]

    for i, each in enumerate(computation.instructions):
        operands = [values[name] for name in each.operands if name in values]
        if each.opcode in _REGROUP and operands:
            values[each.name] = _regrouped(each, operands)
            continue
        for buffer in _leaves(operands):
            buffer.last = i
        if each.opcode == "while":
            values[each.name] = operands[0]
        elif each.opcode == "copy-start" and isinstance(each.shape, tuple):
            values[each.name] = (new(each.shape[0], i, False), operands[0])
        else:
            values[each.name] = new(each.shape, i, each.opcode in _GIVEN)
    for buffer in _leaves(values[computation.root.name]):
        buffer.last = len(computation.instructions)
    return buffers, values


def _regrouped(each: Instruction, operands: list[Any]) -> Any:
    if each.opcode == "tuple":
        return tuple(operands)
    (first, *_) = operands
    if each.opcode == "get-tuple-element":
        return first[int(each.attributes.partition("index=")[2].partition(",")[0])]
    return first[0] if each.opcode == "copy-done" and isinstance(first, tuple) else first


def _leaves(value: Any) -> Iterator[_Buffer]:
    if isinstance(value, _Buffer):
        yield value
        return
    for part in value:
        yield from _leaves(part)


def _write_over(
    module: Module,
    computation: Computation,
    buffers: list[_Buffer],
    values: dict[str, Any],
    role: str,
) -> None:
    """Let results take the place of operands that die there."""
    # What a loop's body is given is its own to write to; other callers' buffers are not.
    kept = ("constant",) if role == "while" else ("constant", "parameter")
    fixed = {
        id(buffer)
        for each in computation.instructions
        if each.opcode in kept
        for buffer in _leaves(values[each.name])
    }
    for i, each in enumerate(computation.instructions):
        made = values[each.name]
        if each.opcode in (*_REGROUP, *_GIVEN, "while") or not isinstance(made, _Buffer):
            continue
        for k, name in enumerate(each.operands):
            old = values.get(name)
            if not isinstance(old, _Buffer) or id(old.whole) in fixed:
                continue
            whole = old.whole
            if whole.last == i and whole.size == made.size and _may_write(module, each, k):
                made.over, whole.last = whole, made.last
                break


def _may_write(module: Module, each: Instruction, k: int) -> bool:
    if each.opcode == "fusion":
        fused = [module.computations[name] for name in each.call_checked.get("calls", ())]
        return bool(fused) and _is_elementwise(fused[0], k)
    if each.opcode in _IN_PLACE:
        return k == 0
    return each.opcode not in _NOT_ELEMENTWISE


def _is_elementwise(fused: Computation, k: int) -> bool:
    """Whether all that is made of operand `k` is made entry by entry, or written into it."""
    reached: Collection[str] = {
        each.name
        for each in fused.instructions
        if each.opcode == "parameter" and each.parameter == k
    }
    reached = set(reached)
    for each in fused.instructions:
        reads = [n for n, name in enumerate(each.operands) if name in reached]
        if not reads:
            continue
        if each.opcode in _IN_PLACE:
            if reads != [0]:
                return False
        elif each.opcode in _NOT_ELEMENTWISE or each.opcode == "fusion":
            return False
        reached.add(each.name)
    return fused.root.name in reached
