"""Parse the text of a compiled program into instructions, in the order in which they run.

>>> text = '''
... ENTRY %main (x: f32[4]) -> f32[4] {
...   %x = f32[4]{0} parameter(0)
...   ROOT %y = f32[4]{0} sine(%x), metadata={op_name="jit(f)/jvp()/sin"}
... }
... '''
>>> module = parse_hlo(text)
>>> [(i.name, i.opcode, i.operands, i.shape) for i in module.entry.instructions][1]
('y', 'sine', ('x',), 16)
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from jrc.remat._compiled.hlo_opcodes import opcode_facts

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"(calls|to_apply|body|condition|branch_computations|called_computations"
                     r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)")  # fmt: skip
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")

Shape = Any
"""The bytes of an array, or a tuple of shapes."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
        name: Its name, unique in its computation.
        opcode: Its opcode, such as `fusion`.
        shape: Bytes of its result; a tuple for a result of several arrays.
        types: The types of its arrays, without layouts: `f32[2,3]`.
        result: The text of its type, with layouts and memory spaces.
        operands: Names of its operands.
        inside: The text between its parentheses.
        called: Names of the computations that it runs, by role (`body`, `condition`, …).
        path: The name scopes and the primitive that it comes from: `jit(f)/jvp()/sin`.
        attributes: The text after its operands.
        is_root: Whether its result is that of its computation.
    """

    name: str
    opcode: str
    shape: Shape
    types: tuple[str, ...]
    result: str
    operands: tuple[str, ...]
    inside: str
    called: Mapping[str, tuple[str, ...]]
    path: str
    attributes: str
    is_root: bool

    @property
    def array_bytes(self) -> tuple[int, ...]:
        """Bytes of each array of its result."""
        return tuple(map(_bytes_of_type, self.types))

    @property
    def parameter(self) -> int | None:
        """The number of the computation's input that it is, if it is one."""
        return int(self.inside) if self.opcode == "parameter" else None

    @property
    def element(self) -> int | None:
        """The number of the tuple's element that it returns, if it returns one."""
        found = re.search(r"\bindex=(\d+)", self.attributes)
        return int(found[1]) if found and self.opcode == "get-tuple-element" else None

    @property
    def known_trips(self) -> int | None:
        """The number of iterations of a loop where the compiler has written it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A sequence of instructions, in the order in which they run."""

    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """The instructions by their names."""
        return {each.name: each for each in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @property
    def results(self) -> tuple[Instruction, ...]:
        """The instructions whose results the computation returns: several for a tuple."""
        root = self.root
        names = root.operands if root.opcode == "tuple" else (root.name,)
        return tuple(self.by_name[name] for name in names)


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program: its computations by name, the entry computation, its devices."""

    computations: Mapping[str, Computation]
    entry: Computation
    devices: int = 1

    def called(self, instruction: Instruction) -> Iterator[Computation]:
        """Yield the computations that an instruction runs."""
        for names in instruction.called.values():
            yield from (self.computations[name] for name in names if name in self.computations)

    def paths(self, instruction: Instruction) -> Iterator[str]:
        """Yield the paths of an instruction and of all instructions that were fused into it."""
        yield instruction.path
        if opcode_facts(instruction.opcode).is_merged:
            for computation in self.called(instruction):
                for each in computation.instructions:
                    yield from self.paths(each)


def parse_hlo(text: str) -> Module:
    """Parse what `compiled.as_text()` prints."""
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, lines = head[2], []
            entry = name if head[1] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(tuple(lines))
            name = ""
        elif name and (found := _INSTRUCTION.match(line)):
            lines.append(_instruction(found[2], found[3], bool(found[1])))
    counts = re.findall(r"num_(?:partitions|replicas)=(\d+)", text.partition("\n\n")[0])
    return Module(computations, computations[entry], math.prod(map(int, counts)))


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    inside, attributes = rest[:end], rest[end + 1 :]
    path = re.search(r'op_name="((?:[^"\\]|\\.)*)"', attributes)
    called = {
        role: tuple(re.findall(r"[\w.\-]+", names)) for role, names in _CALLED.findall(attributes)
    }
    return Instruction(
        name=name,
        opcode=opcode,
        shape=_shape(result),
        types=tuple(f"{dtype}[{sizes}]" for dtype, sizes in _ARRAY.findall(result)),
        result=result,
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        inside=inside,
        called=called,
        path=path[1] if path else "",
        attributes=attributes,
        is_root=is_root,
    )


def _closing(text: str) -> int:
    """Return the position of the parenthesis that closes the first one."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return i
    return len(text) - 1


def _shape(text: str) -> Shape:
    """Return the bytes of each array of a shape: `(f32[2]{0}, s32[])` is `(8, 4)`."""
    text = re.sub(r"/\*.*?\*/", "", text).strip()
    if not text.startswith("("):
        found = _ARRAY.match(text)
        return _bytes(found[1], found[2]) if found else 0
    return tuple(_shape(part) for part in _parts(text[1:-1]))


def _parts(text: str) -> Iterator[str]:
    """Split text at the commas outside of all brackets."""
    depth = start = 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            yield text[start:i]
            start = i + 1
    if text[start:].strip():
        yield text[start:]


class ArrayType(NamedTuple):
    """The type of an array: its dtype as XLA names it, and its dimensions."""

    dtype: str
    dims: tuple[int, ...]


def shape_of_type(text: str) -> ArrayType:
    """Return the dtype and the dimensions of a type.

    >>> shape_of_type("bf16[8,128]")
    ArrayType(dtype='bf16', dims=(8, 128))
    """
    found = _ARRAY.match(text)
    assert found, text
    return ArrayType(found[1], tuple(int(n.lstrip("<=")) for n in found[2].split(",") if n))


def _bytes_of_type(text: str) -> int:
    found = _ARRAY.match(text)
    return _bytes(found[1], found[2]) if found else 0


def _bytes(dtype: str, dimensions: str) -> int:
    """Return the bytes of an array; the digits of a type's name are its bits: `s4`, `f8e4m3fn`."""
    bits = _BITS.get(dtype)
    if bits is None:
        number = re.search(r"\d+", dtype)
        bits = int(number[0]) if number else 0
    sizes = (int(n.lstrip("<=")) for n in dimensions.split(",") if n)
    return -(-bits * math.prod(sizes) // 8)
