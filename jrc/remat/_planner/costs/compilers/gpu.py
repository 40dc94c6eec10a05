"""XLA's compiler for GPUs."""

from jrc.remat._planner.costs.compilers.compiler import Compiler

GPU = Compiler()
