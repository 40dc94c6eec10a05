"""Cycles of a program as the TPU compiler states them.

The text of a compiled program has `estimated_cycles` for each kernel. Copies between memories that
run beside the kernels, and collectives, have none. Of a kernel that a SparseCore runs, a gather of
an embedding, the largest of all numbers is stated.

>>> from jrc.remat._compiled.hlo import parse_hlo
>>> module = parse_hlo('''
... ENTRY %main (x: f32[4]) -> f32[4] {
...   %x = f32[4]{0} parameter(0)
...   ROOT %y = f32[4]{0} fusion(%x), kind=kLoop, backend_config={"estimated_cycles":"37"}
... }
... ''')
>>> cycles(module, lambda around, each: 0.0)
37.0
"""

import re
from collections.abc import Callable

from jrc.remat._compiled.hlo import Computation, Instruction, Module
from jrc.remat._time.executed import sum_over_executed

_UNKNOWN = 2**63 - 1

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def cycles(module: Module, otherwise: Callable[[Computation, Instruction], float]) -> float:
    """Return the cycles of one run of a program.

    Args:
        module: The program.
        otherwise: The cycles of a kernel, with its computation, of which the compiler knows none.
    """

    def stated(around: Computation, each: Instruction) -> float:
        found = _CYCLES.search(each.attributes)
        if not found:
            return 0.0
        count = int(found[1])
        return float(count) if count < _UNKNOWN else otherwise(around, each)

    return sum_over_executed(module, stated)
