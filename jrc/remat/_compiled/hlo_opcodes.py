"""The table of HLO opcodes: all that the report knows of each, one row each.

A new opcode is one row here. What has no row is assumed to be elementwise: XLA may write its result
over any operand of the same size.

>>> opcode_facts("all-gather-start").is_collective, opcode_facts("tanh").overwrites
(True, <Overwrites.ANY: 3>)

Source: XLA, "Operation semantics", https://openxla.org/xla/operation_semantics; buffer sharing in
`HloDataflowAnalysis::CanShareOperandBufferWithUser`.
"""

import dataclasses
import enum


class Overwrites(enum.Enum):
    """Which operand's buffer a result may be written over, if nothing reads that operand later.

    NONE: none of them.
    FIRST: the first one.
    ANY: every one of the same size, as in an elementwise instruction.
    """

    NONE = enum.auto()
    FIRST = enum.auto()
    ANY = enum.auto()


@dataclasses.dataclass(frozen=True)
class OpcodeFacts:
    """What is known of one opcode.

    Attributes:
        overwrites: Which operand's buffer its result may take.
        forwards_operands: Whether its result is its operands' buffers, renamed or regrouped.
        is_preallocated: Whether its buffer is there before the program runs.
        runs_computations: Whether it runs computations that have a schedule of their own.
        is_merged: Whether it stands for the instructions of the computation that it calls.
        is_collective: Whether devices exchange data in it.
    """

    overwrites: Overwrites = Overwrites.ANY
    forwards_operands: bool = False
    is_preallocated: bool = False
    runs_computations: bool = False
    is_merged: bool = False
    is_collective: bool = False

    @property
    def allocates(self) -> bool:
        """Whether it makes a buffer: only such an instruction is a point of the memory curve."""
        return not (self.forwards_operands or self.is_preallocated)


_TABLE: dict[str, OpcodeFacts] = {}
_ELEMENTWISE = OpcodeFacts()


def opcode_facts(opcode: str) -> OpcodeFacts:
    """Return the row of an opcode; what starts a collective (`-start`) has the collective's row."""
    return _TABLE.get(opcode) or _TABLE.get(opcode.removesuffix("-start"), _ELEMENTWISE)


def is_elementwise(opcode: str) -> bool:
    """Return whether an instruction computes each entry of its result from one of each operand."""
    return opcode_facts(opcode) is _ELEMENTWISE


def _row(opcodes: str, **facts) -> None:
    """Add one row for each opcode."""
    for opcode in opcodes.split():
        assert opcode not in _TABLE, opcode
        _TABLE[opcode] = OpcodeFacts(**facts)


_none, _first = {"overwrites": Overwrites.NONE}, {"overwrites": Overwrites.FIRST}

# Operands, renamed or regrouped.
_row("tuple get-tuple-element", forwards_operands=True)
_row("bitcast optimization-barrier copy-done fusion-done async-done add-dependency domain",
     forwards_operands=True)  # fmt: skip

# There before the program runs.
_row("parameter constant partition-id replica-id after-all", is_preallocated=True)

# Computations inside.
_row("while", runs_computations=True)
_row("conditional async-start", **_none, runs_computations=True)
_row("call", **_none, runs_computations=True, is_merged=True)
_row("fusion", **_none, is_merged=True)

# Entries moved, or made of several others.
_row("broadcast reshape dynamic-reshape transpose slice dynamic-slice gather pad concatenate "
     "reverse iota copy copy-start", **_none)  # fmt: skip
_row("reduce reduce-window select-and-scatter dot convolution fft triangular-solve cholesky topk "
     "rng rng-bit-generator custom-call", **_none)  # fmt: skip

# Written into the first operand.
_row("dynamic-update-slice scatter sort", **_first)

# To another slice of TPUs, through the hosts.
_row("send", **_none, is_collective=True)

# Collectives. The second operand of `ragged-all-to-all` is the buffer for its result.
_row("all-reduce", **_first, is_collective=True)
_row("all-gather reduce-scatter all-to-all collective-permute", **_none, is_collective=True)
_row("ragged-all-to-all collective-broadcast", is_collective=True)
