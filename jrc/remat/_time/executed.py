"""A sum over all that a compiled program runs: loops as often as they iterate."""

from collections.abc import Callable

from jrc.remat._compiled.hlo import Computation, Instruction, Module
from jrc.remat._compiled.hlo_opcodes import opcode_facts
from jrc.remat._compiled.trip_count import trip_count


def sum_over_executed(module: Module, cost: Callable[[Computation, Instruction], float]) -> float:
    """Return the sum of a cost over all instructions that a program runs.

    A loop's body counts as often as it iterates, once where the program does not tell. Of a
    conditional the dearest branch counts. What is fused belongs to its fusion.

    Args:
        module: The program.
        cost: What one run of an instruction costs, from the computation that holds it, and it.
    """
    known: dict[int, float] = {}

    def of(computation: Computation) -> float:
        if id(computation) not in known:
            known[id(computation)] = sum(
                map(lambda each: run(computation, each), computation.instructions)
            )
        return known[id(computation)]

    def run(computation: Computation, each: Instruction) -> float:
        if not (opcode_facts(each.opcode).runs_computations or each.opcode == "call"):
            return cost(computation, each)
        inside = list(map(of, module.called(each)))
        if each.opcode == "conditional":
            return max(inside, default=0.0)
        return trip_count(module, computation, each) * sum(inside)

    return of(module.entry)
