"""XLA's compiler for GPUs."""

from jrc.remat._planner.costs.compilers.compiler import Compiler


class _Gpu(Compiler):
    slices_early = True


GPU = _Gpu()
