"""What a kernel of a compiled program reads, writes and computes.

>>> from jrc.remat._compiled.hlo import parse_hlo
>>> module = parse_hlo('''
... ENTRY %main (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
...   %a = f32[8,16]{1,0} parameter(0)
...   %b = f32[16,4]{1,0} parameter(1)
...   ROOT %c = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
... }
... ''')
>>> kernel = kernel_of(module, module.entry, module.entry.root)
>>> kernel.bytes, kernel.products, kernel.functions
(896, {'f32': 1024}, 0.0)
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jrc.remat._compiled.hlo import Computation, Instruction, Module, shape_of_type
from jrc.remat._compiled.hlo_opcodes import is_elementwise, opcode_facts
from jrc.remat._time.function_costs import (
    ARITHMETIC,
    IN_WINDOW,
    function_cost_of_opcode,
    routine_cost,
    routine_of,
)
from jrc.remat._time.memory_traffic import (
    bytes_moved,
    is_fusion,
    is_library_product,
    result_types,
)
from jrc.remat._time.strided_reads import strided_reads

_AXIS = re.compile(r"\bdimensions=\{(\d+)\}")
_FFT = re.compile(r"\bfft_length=\{([\d,]+)\}")
_WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LABELS = re.compile(r"dim_labels=(\w+->\w+)")
_IN_LIBRARY = re.compile(r"b(01?)f_\1io->b\1f")


class Kernel(NamedTuple):
    """A kernel.

    Attributes:
        bytes: Bytes that it reads and writes.
        products: FLOPs of matrix products and convolutions, by the dtype of their operands.
        convolves: Whether a convolution is among them.
        in_library: Whether convolutions have the form that XLA for CPUs calls a library for: the
            channels are last, the kernel's dimensions are in their order, images have at most two
            dimensions, and groups several features.
        functions: How long it computes beside products, as values of tanh: `function_costs`.
        strided: Entries that the loop of a fusion reads in steps, by the bytes of a cache
            that holds a column: `strided_reads`.
    """

    bytes: int
    products: Mapping[str, int]
    convolves: bool
    in_library: bool
    functions: float
    strided: Mapping[int, int]


def kernel_of(module: Module, around: Computation, each: Instruction) -> Kernel | None:
    """Return the kernel that an instruction is; `None` if it only renames what is there.

    Args:
        module: The program.
        around: The computation that holds the instruction.
        each: The instruction, which runs no computation but what is fused into it.
    """
    facts = opcode_facts(each.opcode)
    # What starts a fusion is its kernel: GPUs copy a slice of a stack of layers like that.
    is_half = each.opcode.endswith(("-start", "-done")) and not is_fusion(each)
    if not facts.allocates or facts.is_collective or is_half:
        return None
    (fused,) = module.called(each) if is_fusion(each) else (None,)
    products: dict[str, int] = {}
    convolves, in_library = False, True
    for computation, inner in _merged(module, around, each):
        if not (inner.opcode in ("dot", "convolution") or is_library_product(inner)):
            continue
        dtype, flops = _product(computation, inner)
        products[dtype] = products.get(dtype, 0) + flops
        if labels := _LABELS.search(inner.attributes):
            convolves = True
            in_library &= bool(_IN_LIBRARY.fullmatch(labels[1]))
            in_library &= not _is_depthwise(computation, inner)
    functions = math.fsum(_function_cost(*inner) for inner in _merged(module, around, each))
    is_loop = fused is not None and "kind=kLoop" in each.attributes
    return Kernel(
        bytes=bytes_moved(module, around, each),
        products=products,
        convolves=convolves,
        in_library=in_library,
        functions=functions,
        strided=strided_reads(fused) if is_loop else {},
    )


def _merged(
    module: Module, around: Computation, each: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """An instruction, or all that is fused into it, each with its computation."""
    if not is_fusion(each):
        yield around, each
        return
    for computation in module.called(each):
        for inner in computation.instructions:
            yield from _merged(module, computation, inner)


def _function_cost(around: Computation, each: Instruction) -> float:
    """How long an instruction computes that is no product, as values of tanh."""
    cost = function_cost_of_opcode(each.opcode)
    if cost is not None:
        result = shape_of_type(each.types[0])
        return cost * math.prod(result.dims) if result.dtype[0] in "fbc" else 0.0
    target = _TARGET.search(each.attributes)
    routine = routine_of(each.opcode, target[1] if target else "")
    operands = [shape_of_type(i.types[0]).dims for i in _operands(around, each)]
    if not routine:
        return _arithmetic_cost(each, operands)
    results = [shape_of_type(t).dims for t in result_types(each)]
    return routine_cost(routine, operands, results, _entries_along(each, operands))


def _arithmetic_cost(each: Instruction, operands: Sequence[Sequence[int]]) -> float:
    """How long arithmetic takes: of a sum that of its summands."""
    entries = math.prod(shape_of_type(each.types[0]).dims) if each.types else 0
    if each.opcode == "reduce" and operands:
        return ARITHMETIC * math.prod(operands[0])
    if each.opcode == "reduce-window" and (size := _WINDOW.search(each.attributes)):
        return IN_WINDOW * entries * math.prod(map(int, size[1].split("x")))
    return ARITHMETIC * entries if is_elementwise(each.opcode) else 0.0


def _entries_along(each: Instruction, operands: Sequence[Sequence[int]]) -> int:
    """How many entries an instruction sorts, or transforms, together; 1 of others."""
    if lengths := _FFT.search(each.attributes):
        return math.prod(map(int, lengths[1].split(",")))
    axis = _AXIS.search(each.attributes)
    return operands[0][int(axis[1])] if axis and operands else 1


def _product(around: Computation, each: Instruction) -> tuple[str, int]:
    """The dtype of a product's operands, and its FLOPs."""
    given = [shape_of_type(i.types[0]) for i in _operands(around, each)[:2]]
    dtype = given[0].dtype if given else ""
    result = max((shape_of_type(t).dims for t in result_types(each)), key=math.prod, default=())
    if "dim_labels=" in each.attributes and len(given) > 1:
        return dtype, _convolution_flops(each, given[0].dims, given[1].dims, result)
    contracted = _dimensions(each, "lhs_contracting")
    if not given or not contracted:
        return dtype, 0
    sizes = [given[0].dims[i] for i in contracted]
    return dtype, 2 * math.prod(result) * math.prod(sizes)


def _operands(around: Computation, each: Instruction) -> list[Instruction]:
    found = (around.by_name.get(name) for name in each.operands)
    return [i for i in found if i is not None and i.types]


def _dimensions(each: Instruction, which: str) -> list[int]:
    """Dimensions of a product, as an attribute or as a library's call has them."""
    found = re.search(rf"{which}_dims=\{{([\d,]*)\}}", each.attributes) or re.search(
        rf'"{which}_dimensions":\[([^\]]*)\]', each.attributes
    )
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []


def _is_depthwise(around: Computation, each: Instruction) -> bool:
    """Whether each feature of a convolution, whose channels are last, is a group of its own."""
    if "feature_group_count=" not in each.attributes:
        return False
    return shape_of_type(_operands(around, each)[1].types[0]).dims[-2] == 1


def _convolution_flops(
    each: Instruction, left: Sequence[int], right: Sequence[int], result: Sequence[int]
) -> int:
    """FLOPs of a convolution: a product and a sum for each entry of the kernel and the output.

    A library's call for a gradient returns the input or the kernel in the output's place.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.attributes)
    target = _TARGET.search(each.attributes)
    if labels is None:
        return 0
    name = target[1] if target else ""
    kernel, output = right, result
    if "BackwardInput" in name:
        output = left
    elif "BackwardFilter" in name:
        kernel, output = result, right
    features = kernel[labels[2].index("o")]
    return 2 * math.prod(output) * math.prod(kernel) // max(features, 1)
