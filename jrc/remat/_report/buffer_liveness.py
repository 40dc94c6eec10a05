"""Live bytes along a compiled program's schedule.

An instruction allocates buffers for its result, and a buffer is freed after its last reader. An
instruction that renames or regroups buffers allocates none, a loop updates its state in place, and
an elementwise instruction writes over an operand that nothing else reads later. These are the rules
of XLA's own buffer assignment; `hlo_opcodes` has them for each opcode.

>>> from jrc.remat._compiled.hlo import parse_hlo
>>> live_bytes(parse_hlo('''
... ENTRY %main (x: f32[4]) -> f32[4] {
...   %x = f32[4]{0} parameter(0)
...   %y = f32[8]{0} custom-call(%x)
...   ROOT %z = f32[4]{0} custom-call(%y)
... }
... '''))
[0, 32, 48]
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from jrc.remat._compiled.hlo import Computation, Instruction, Module
from jrc.remat._compiled.hlo_opcodes import Overwrites, opcode_facts

_STARTS = ("fusion-start", "async-start")


def live_bytes(module: Module, donated: Mapping[int, int] | None = None) -> list[int]:
    """Return the bytes of temporaries and results while each instruction of the program runs.

    Args:
        module: The program.
        donated: The results that lie in the memory of donated arguments, each with the number of
            the argument; these do not count.
    """
    return _Schedule(module, donated or {}).curve(module.entry, "entry")


def donated_results(text: str) -> dict[int, int]:
    """Return which results of a compiled program lie in the memory of which arguments.

    >>> donated_results("HloModule f, input_output_alias={ {1}: (0, {}, may-alias) }, entry")
    {1: 0}
    """
    head = text.partition("\n")[0].partition("input_output_alias=")[2]
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)", head)
    return {int(result or 0): int(argument) for result, argument in pairs}


@dataclasses.dataclass
class _Buffer:
    """A buffer of a computation.

    Attributes:
        size: Its bytes.
        start: The position of the instruction that allocates it.
        last: The position of the last instruction that reads it.
        is_external: Whether something else allocates it: the caller, or the program's loader.
        reuses: The buffer that it is written over.
    """

    size: int
    start: int
    last: int
    is_external: bool
    reuses: "_Buffer | None" = None

    @property
    def allocation(self) -> "_Buffer":
        """The buffer whose memory this one has: its own, or that of the one it is written over."""
        return self if self.reuses is None else self.reuses.allocation


class _Schedule:
    """The memory curves of a program's computations; each peak is computed once."""

    def __init__(self, module: Module, donated: Mapping[int, int]):
        self.module = module
        self.donated = donated
        self.peaks: dict[str, int] = {}

    def curve(self, computation: Computation, role: str) -> list[int]:
        """Return the live bytes at each instruction, of buffers that the computation allocates.

        Args:
            computation: The computation.
            role: The opcode of the instruction that runs it, or `"entry"`.
        """
        buffers, values = _allocate(computation)
        if role == "entry":
            self._place_in_arguments(computation, values)
        _write_over(self.module, computation, buffers, values, role)
        if role != "entry":
            # The caller allocates what a computation returns.
            for buffer in _leaves(values[computation.root.name]):
                buffer.allocation.is_external = True
        end = len(computation.instructions)
        changes = [0] * (end + 1)
        for buffer in buffers:
            if buffer.reuses is None and not buffer.is_external:
                changes[buffer.start] += buffer.size
                changes[min(buffer.last, end - 1) + 1] -= buffer.size
        inside = map(self._inside, computation.instructions)
        return [level + more for level, more in zip(accumulate(changes[:end]), inside, strict=True)]

    def _place_in_arguments(self, computation: Computation, values: dict[str, Any]) -> None:
        """Let donated results, and copies of the arguments, lie in the arguments' memory."""
        for k, buffer in enumerate(_leaves(values[computation.root.name])):
            buffer.is_external |= k in self.donated
        for each in computation.instructions:
            sources = [computation.by_name.get(name) for name in each.operands]
            numbers = {source.parameter for source in sources if source is not None}
            if each.opcode == "copy" and numbers & set(self.donated.values()):
                for buffer in _leaves(values[each.name]):
                    buffer.is_external = True

    def _inside(self, each: Instruction) -> int:
        """Return the largest peak of the computations that an instruction runs."""
        if not opcode_facts(each.opcode).runs_computations:
            return 0
        known = (n for names in each.called.values() for n in names)
        known = (n for n in known if n in self.module.computations)
        return max((self._peak(name, each.opcode) for name in known), default=0)

    def _peak(self, name: str, role: str) -> int:
        if name not in self.peaks:
            self.peaks[name] = max(self.curve(self.module.computations[name], role), default=0)
        return self.peaks[name]


def _allocate(computation: Computation) -> tuple[list[_Buffer], dict[str, Any]]:
    """Return all buffers, and those of each instruction's result in the result's structure."""
    buffers: list[_Buffer] = []
    values: dict[str, Any] = {}

    def new(shape: Any, i: int, is_external: bool) -> Any:
        if isinstance(shape, tuple):
            return tuple(new(part, i, is_external) for part in shape)
        buffers.append(_Buffer(shape, i, i, is_external))
        return buffers[-1]

    for i, each in enumerate(computation.instructions):
        facts = opcode_facts(each.opcode)
        operands = [values[name] for name in each.operands if name in values]
        if facts.forwards_operands and operands:
            values[each.name] = _forwarded(each, operands)
            continue
        for buffer in _leaves(operands):
            buffer.last = i
        if each.opcode == "while":
            values[each.name] = operands[0]
        elif each.opcode == "copy-start" and isinstance(each.shape, tuple):
            values[each.name] = (new(each.shape[0], i, False), operands[0])
        elif each.opcode in _STARTS and isinstance(each.shape, tuple):
            # Its operands, its result, and what it works in.
            rest = (new(part, i, False) for part in each.shape[1:])
            values[each.name] = (tuple(operands), *rest)
        else:
            values[each.name] = new(each.shape, i, facts.is_preallocated)
    for buffer in _leaves(values[computation.root.name]):
        buffer.last = len(computation.instructions)
    return buffers, values


def _forwarded(each: Instruction, operands: list[Any]) -> Any:
    """Return the operands' buffers in the structure of the instruction's result."""
    if each.opcode == "tuple":
        return tuple(operands)
    (first, *_) = operands
    if each.opcode == "get-tuple-element":
        return first[each.element]
    if not isinstance(first, tuple) or not each.opcode.endswith("-done"):
        return first
    return first[0 if each.opcode == "copy-done" else 1]


def _leaves(value: Any) -> Iterator[_Buffer]:
    """Yield the buffers of a nested tuple."""
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
    """Let a result reuse the buffer of an operand that it reads last."""
    # A loop's body may write over its own state; no computation writes over other parameters.
    read_only = ("constant",) if role == "while" else ("constant", "parameter")
    fixed = {
        id(buffer)
        for each in computation.instructions
        if each.opcode in read_only
        for buffer in _leaves(values[each.name])
    }
    for i, each in enumerate(computation.instructions):
        result = values[each.name]
        if not opcode_facts(each.opcode).allocates or each.opcode == "while":
            continue
        if not isinstance(result, _Buffer) or result.is_external:
            continue
        for k, name in enumerate(each.operands):
            operand = values.get(name)
            if not isinstance(operand, _Buffer) or id(operand.allocation) in fixed:
                continue
            # XLA looks at what an instruction reads itself, and not behind another name of it.
            if opcode_facts(computation.by_name[name].opcode).forwards_operands:
                continue
            old = operand.allocation
            if old.last == i and old.size == result.size and _may_overwrite(module, each, k):
                result.reuses, old.last = old, result.last
                break


def _may_overwrite(module: Module, each: Instruction, k: int) -> bool:
    """Return whether an instruction may write its result over operand `k`."""
    if each.opcode == "fusion":
        fused = [module.computations[name] for name in each.called.get("calls", ())]
        return bool(fused) and _is_elementwise(fused[0], k)
    overwrites = opcode_facts(each.opcode).overwrites
    return overwrites is Overwrites.ANY or (overwrites is Overwrites.FIRST and k == 0)


def _is_elementwise(fused: Computation, k: int) -> bool:
    """Return whether all values made from operand `k` are elementwise, or written into it."""
    reached = {
        each.name
        for each in fused.instructions
        if each.opcode == "parameter" and each.parameter == k
    }
    for each in fused.instructions:
        reads = [n for n, name in enumerate(each.operands) if name in reached]
        if not reads:
            continue
        overwrites = opcode_facts(each.opcode).overwrites
        if overwrites is Overwrites.NONE or (overwrites is Overwrites.FIRST and reads != [0]):
            return False
        reached.add(each.name)
    return fused.root.name in reached
