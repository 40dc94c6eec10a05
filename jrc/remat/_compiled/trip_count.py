"""How often a loop of a compiled program iterates.

Some compilers write the number. Others leave it to the loop's condition, `counter < limit`.

>>> from jrc.remat._compiled.hlo import parse_hlo
>>> module = parse_hlo('''
... %body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
...   ROOT %p = (s32[], f32[4]) parameter(0)
... }
... %condition (q: (s32[], f32[4])) -> pred[] {
...   %q = (s32[], f32[4]) parameter(0)
...   %i = s32[] get-tuple-element(%q), index=0
...   %limit = s32[] constant(12)
...   ROOT %lt = pred[] compare(%i, %limit), direction=LT
... }
... ENTRY %main (x: f32[4]) -> (s32[], f32[4]) {
...   %x = f32[4] parameter(0)
...   %start = s32[] constant(2)
...   %state = (s32[], f32[4]) tuple(%start, %x)
...   ROOT %loop = (s32[], f32[4]) while(%state), condition=%condition, body=%body
... }
... ''')
>>> trip_count(module, module.entry, module.entry.root)
10
"""

from jrc.remat._compiled.hlo import Computation, Instruction, Module

_FORWARDS = ("copy", "bitcast", "convert", "copy-done", "copy-start")


def trip_count(module: Module, around: Computation, loop: Instruction) -> int:
    """Return the number of iterations of a loop, and 1 where the program does not tell.

    Args:
        module: The program.
        around: The computation that holds the loop.
        loop: The instruction; one that is no loop runs once.
    """
    if loop.opcode != "while":
        return 1
    if loop.known_trips is not None:
        return loop.known_trips
    condition = module.computations.get(*loop.called.get("condition", ("",))[:1])
    if condition is None or "direction=LT" not in condition.root.attributes:
        return 1
    counter, limit = (condition.by_name.get(name) for name in condition.root.operands[:2])
    bound = _constant(condition, limit)
    if counter is None or counter.element is None or bound is None:
        return 1
    start = _constant(around, _element(around, loop.operands[0], counter.element))
    return max(1, bound - (start or 0))


def _element(computation: Computation, name: str, index: int) -> Instruction | None:
    """Return the instruction that makes an element of a tuple."""
    state = computation.by_name.get(name)
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return None
    return computation.by_name.get(state.operands[index])


def _constant(computation: Computation, each: Instruction | None) -> int | None:
    """Return the value of an integer constant, and `None` of what is none."""
    while each is not None and each.opcode in _FORWARDS and each.operands:
        each = computation.by_name.get(each.operands[0])
    if each is None or each.opcode != "constant" or not each.inside.lstrip("-").isdigit():
        return None
    return int(each.inside)
