"""Bytes that a kernel of a compiled program reads and writes.

A loop computes a value inside of a fusion only at the entries that something reads: where only a
slice of it is read, so many. What is updated where it lies is written at the update alone.

>>> from jrc.remat._compiled.hlo import parse_hlo
>>> module = parse_hlo('''
... %row (p: f32[100,8], i: s32[]) -> f32[1,8] {
...   %p = f32[100,8]{1,0} parameter(0)
...   %i = s32[] parameter(1)
...   %e = f32[100,8]{1,0} exponential(%p)
...   ROOT %s = f32[1,8]{1,0} dynamic-slice(%e, %i, %i), dynamic_slice_sizes={1,8}
... }
...
... ENTRY %main (x: f32[100,8], n: s32[]) -> f32[1,8] {
...   %x = f32[100,8]{1,0} parameter(0)
...   %n = s32[] parameter(1)
...   ROOT %f = f32[1,8]{1,0} fusion(%x, %n), kind=kLoop, calls=%row
... }
... ''')
>>> bytes_moved(module, module.entry, module.entry.root)
68
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from jrc.remat._compiled.hlo import Computation, Instruction, Module, shape_of_type

_VIEWS = ("bitcast", "get-tuple-element")
# Of these as much of the first operand is read as there is of the result.
_SLICES = ("dynamic-slice", "gather", "slice")
# Of these each entry depends on more of the operands than the entries in its place.
_WHOLE = (
    "dot", "convolution", "reduce-window", "select-and-scatter", "sort", "fft", "cholesky",
    "triangular-solve", "topk", "scatter", "custom-call", "call",
)  # fmt: skip


def is_fusion(each: Instruction) -> bool:
    """Return whether an instruction runs, or starts, what is fused into it."""
    return each.opcode in ("fusion", "fusion-start")


def is_library_product(each: Instruction) -> bool:
    """Return whether it is a call of a library's product: cuBLAS, cuDNN, oneDNN."""
    named = re.search(r'custom_call_target="(__[^"]*)"', each.attributes)
    return bool(named and re.search(r"gemm|matmul|conv", named[1]))


def result_types(each: Instruction) -> tuple[str, ...]:
    """Return the types of what an instruction returns, without the workspace of a library.

    A product by a library returns its workspace last, as bytes.
    """
    if len(each.types) > 1 and is_library_product(each):
        last = shape_of_type(each.types[-1])
        if last.dtype in ("s8", "u8") and len(last.dims) == 1:
            return tuple(each.types[:-1])
    return tuple(each.types)


def bytes_moved(module: Module, around: Computation, each: Instruction) -> int:
    """Return the bytes that an instruction reads and writes.

    Args:
        module: The program.
        around: The computation that holds the instruction.
        each: The instruction, which runs no computation but what is fused into it.
    """
    if is_fusion(each):
        (fused,) = module.called(each)
        in_place = _in_place(fused)
        shares = _shares(module, fused, in_place)
        written = sum(_written(fused, result, in_place) for result in fused.results)
    else:
        in_place = {each.name} if _updates(each) else set()
        shares = _shares_of_operands(module, around, each, in_place)
        written = _written(around, each, in_place)
    read: dict[str, float] = defaultdict(float)
    for i, name in enumerate(each.operands):
        read[name] = max(read[name], shares.get(i, 0.0))
    return written + round(
        sum(share * _size(around.by_name.get(name)) for name, share in read.items())
    )


def _shares(module: Module, fused: Computation, in_place: set[str]) -> dict[int, float]:
    """The share of each parameter of a fusion that is read."""
    # Slices may be of different entries, other readers need the same.
    sliced: dict[str, float] = defaultdict(float)
    entries: dict[str, float] = defaultdict(float)
    for result in fused.results:
        entries[result.name] = 1.0
    found: dict[int, float] = {}
    for each in reversed(fused.instructions):
        share = min(1.0, sliced[each.name] + entries[each.name])
        if each.parameter is not None:
            found[each.parameter] = share
        if not share:
            continue
        parts = _shares_of_operands(module, fused, each, in_place)
        for i, name in enumerate(each.operands):
            if i == 0 and each.opcode in _SLICES:
                sliced[name] += share * parts[i]
            elif each.opcode == "broadcast":
                grown = _size(each) / max(_size(fused.by_name.get(name)), 1)
                entries[name] = max(entries[name], min(1.0, share * grown))
            elif each.opcode in _WHOLE or each.name in in_place:
                entries[name] = max(entries[name], parts[i])
            else:
                entries[name] = max(entries[name], share * parts[i])
    return found


def _shares_of_operands(
    module: Module, around: Computation, each: Instruction, in_place: set[str]
) -> dict[int, float]:
    """The share of each operand that is read where all of the result is needed."""
    if is_fusion(each):
        (fused,) = module.called(each)
        return _shares(module, fused, set())
    updates = _updates(each) if each.name in in_place else ()
    found = dict.fromkeys(range(len(each.operands)), 1.0)
    sizes = [_size(around.by_name.get(name)) for name in each.operands]
    if each.opcode in _SLICES and sizes[0]:
        found[0] = min(1.0, _size(each) / sizes[0])
    for i, update in enumerate(updates):
        # An update in front of it is there; of an array a scatter reads what it adds to.
        adds = each.opcode == "scatter" and sizes[i]
        part = min(1.0, _size(around.by_name.get(update)) / sizes[i]) if adds else 0.0
        found[i] = 1.0 if each.operands[i] in in_place else part
    return found


def _written(where: Computation, result: Instruction, in_place: set[str]) -> int:
    """Bytes that are written for a result: of an array that is updated in place the updates."""
    found = 0
    for each, at in _views_and_updates(where, result):
        if each.name in in_place:
            found += _size(where.by_name.get(_updates(each)[at]))
    return found or sum(result.array_bytes[: len(result_types(result))])


def _views_and_updates(where: Computation, each: Instruction) -> Iterator[tuple[Instruction, int]]:
    """A result and what it is a view or an update of, each with the number of its array."""
    at = 0
    while True:
        at = each.element if each.element is not None else at
        yield each, at if len(_updates(each)) > 1 else 0
        if not each.operands or not (each.opcode in _VIEWS or _updates(each)):
            return
        if each.operands[0] not in where.by_name:
            return
        each = where.by_name[each.operands[0]]


def _in_place(fused: Computation) -> set[str]:
    """The updates of a fusion's parameters, where those lie: one after the other, to a result."""
    found: set[str] = set()
    for result in fused.results:
        chain = [each for each, _ in _views_and_updates(fused, result)]
        if chain[-1].parameter is not None:
            found.update(each.name for each in chain if _updates(each))
    return found


def _updates(each: Instruction) -> Sequence[str]:
    """The operands that are written into the first ones, one for each of those."""
    if each.opcode == "dynamic-update-slice":
        return each.operands[1:2]
    return each.operands[len(each.operands) // 2 + 1 :] if each.opcode == "scatter" else ()


def _size(each: Instruction | None) -> int:
    """Bytes of a result."""
    return sum(each.array_bytes) if each is not None else 0
