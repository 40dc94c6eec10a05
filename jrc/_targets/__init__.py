"""Accelerators that need not be there: their facts, and devices that programs are compiled for."""

from jrc._targets.abstract import abstract_on as abstract_on
from jrc._targets.abstract import checked_target as checked_target
from jrc._targets.compile_only import is_compile_only as is_compile_only
from jrc._targets.target import Target as Target
from jrc._targets.target import target as target
from jrc._targets.target import targets as targets
