"""What the loop of a fusion reads in steps: a result has another order than what it is made of.

XLA for CPUs transposes in tiles where all else in a fusion is elementwise. Otherwise, as with a
constant that is broadcast, it computes the entries of the result one after the other, and reads
what they are made of in steps of a row: nothing is vectorised, and each entry costs a line of the
cache, which may be gone when the next column is read: where rows are a power of two apart, few of
the lines can be in a cache at a time. The products that are weights' gradients often read a
cotangent so, and with it all that the cotangent is a sum of.

>>> from jrc.remat._compiled.hlo import parse_hlo
>>> module = parse_hlo('''
... %fused (a: f32[512,256], b: f32[512], c: f32[256,512]) -> f32[256,512] {
...   %a = f32[512,256]{1,0} parameter(0)
...   %b = f32[512]{0} parameter(1)
...   %c = f32[256,512]{1,0} parameter(2)
...   %over_rows = f32[512,256]{1,0} broadcast(%b), dimensions={0}
...   %d = f32[512,256]{1,0} multiply(%a, %over_rows)
...   %e = f32[256,512]{0,1} transpose(%d), dimensions={1,0}
...   ROOT %f = f32[256,512]{1,0} add(%e, %c)
... }
...
... ENTRY %main (a: f32[512,256], b: f32[512], c: f32[256,512]) -> f32[256,512] {
...   %a = f32[512,256]{1,0} parameter(0)
...   %b = f32[512]{0} parameter(1)
...   %c = f32[256,512]{1,0} parameter(2)
...   ROOT %g = f32[256,512]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%fused
... }
... ''')
>>> strided_reads(module.computations["fused"])  # 131,072 entries, each made of one of `a`
{524288: 131072}
"""

import collections
import math
import re
from collections.abc import Iterator

from jrc.remat._compiled.hlo import Computation, Instruction, shape_of_type
from jrc.remat._compiled.hlo_opcodes import Overwrites, opcode_facts

# Inputs of fewer bytes stay in the cache of a core.
_CACHED = 2**18
# Bytes of a line of a cache.
_LINE = 64
_OTHER_ENTRIES = ("reduce", "reduce-window", "gather", "scatter", "sort", "iota", "fusion", "call")


def strided_reads(fused: Computation) -> dict[int, int]:
    """Return how many entries the loop of a fusion reads in steps of more than one entry.

    They are counted by the bytes of a cache that holds all lines of a column. Small inputs count
    nothing, and nothing where the compiler transposes in tiles.

    Args:
        fused: The computation of the fusion.
    """
    if all(map(_is_elementwise, fused.instructions)):
        return {}
    found: collections.Counter[int] = collections.Counter()
    for root in fused.results:
        for name, along in set(_strided(fused, root)):
            found[_cache_of_column(fused.by_name[name], along)] += math.prod(_dims(root))
    return dict(found)


def _cache_of_column(given: Instruction, along: int) -> int:
    """Bytes of a cache that holds one line of each row: rows as far apart share its places."""
    dims = _dims(given)
    step = _step(given, along) * sum(given.array_bytes) // math.prod(dims)
    return dims[along] * max(_LINE, step & -step)


def _is_elementwise(each: Instruction) -> bool:
    """Whether an entry of its result is made of one entry of each operand, each used once."""
    facts = opcode_facts(each.opcode)
    return (
        each.opcode in ("transpose", "copy", "reshape", "iota")
        or not facts.allocates
        or facts.overwrites is Overwrites.ANY
    )


def _strided(fused: Computation, root: Instruction) -> Iterator[tuple[str, int]]:
    """Yield the inputs that are read in steps, each with the dimension that the loop runs along."""
    order = _order(root)
    waiting = [(root, order[0])] if order else []
    seen = set()
    while waiting:
        each, along = waiting.pop()
        if (each.name, along) in seen:
            continue
        seen.add((each.name, along))
        if each.opcode == "parameter":
            if _step(each, along) > 1 and sum(each.array_bytes) > _CACHED:
                yield each.name, along
            continue
        for name in each.operands:
            operand = fused.by_name[name]
            at = _dimension_of_operand(each, operand, along)
            if at is not None:
                waiting.append((operand, at))


def _dimension_of_operand(each: Instruction, operand: Instruction, along: int) -> int | None:
    """The dimension of an operand along which it is read; `None` if its entries stay the same."""
    if not _dims(operand) or each.opcode in _OTHER_ENTRIES:
        return None
    if each.opcode in ("transpose", "broadcast"):
        found = re.search(r"dimensions=\{([\d,]*)\}", each.attributes)
        dimensions = [int(n) for n in found[1].split(",") if n] if found else []
        if each.opcode == "transpose":
            return dimensions[along]
        return dimensions.index(along) if along in dimensions else None
    if each.opcode in ("bitcast", "reshape"):
        step = _step(each, along)
        inner = (at for at in reversed(_order(operand)) if _step(operand, at) <= step)
        return next((at for at in inner if _dims(operand)[at] > 1), None)
    return along if len(_dims(operand)) == len(_dims(each)) else None


def _step(each: Instruction, along: int) -> int:
    """How many entries lie between two neighbours along a dimension."""
    order = _order(each)
    return math.prod(_dims(each)[at] for at in order[: order.index(along)])


def _dims(each: Instruction) -> tuple[int, ...]:
    return shape_of_type(each.types[0]).dims if each.types else ()


def _order(each: Instruction) -> list[int]:
    """The dimensions of a result, from the one whose entries are neighbours in memory."""
    found = re.search(r"\]\{([\d,]+)", each.result)
    if found is None:
        return list(reversed(range(len(_dims(each)))))
    return [int(n) for n in found[1].split(",")]
