"""Cycles of a program as the TPU compiler states them.

The text of a compiled program has `estimated_cycles` for each kernel. Copies between memories that
run beside the kernels, and collectives, have none.

>>> from jrc.remat._compiled.hlo import parse_hlo
>>> cycles(parse_hlo('''
... ENTRY %main (x: f32[4]) -> f32[4] {
...   %x = f32[4]{0} parameter(0)
...   ROOT %y = f32[4]{0} fusion(%x), kind=kLoop, backend_config={"estimated_cycles":"37"}
... }
... '''))
37.0
"""

import re

from jrc.remat._compiled.hlo import Computation, Instruction, Module
from jrc.remat._time.executed import sum_over_executed

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def cycles(module: Module) -> float:
    """Return the cycles of one run of a program."""

    def stated(_: Computation, each: Instruction) -> float:
        found = _CYCLES.search(each.attributes)
        return float(found[1]) if found else 0.0

    return sum_over_executed(module, stated)
