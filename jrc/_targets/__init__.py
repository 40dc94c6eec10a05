"""Accelerators that need not be there: their facts, and devices that programs are compiled for."""

from jrc._targets.abstract import abstract_on as abstract_on
from jrc._targets.abstract import checked_target as checked_target
from jrc._targets.accelerator import Target as Target
from jrc._targets.accelerator import chip_named as chip_named
from jrc._targets.accelerator import chip_of_device as chip_of_device
from jrc._targets.accelerator import link_bandwidth_of as link_bandwidth_of
from jrc._targets.accelerator import target as target
from jrc._targets.accelerator import targets as targets
from jrc._targets.chips import Chip as Chip
from jrc._targets.compile_only import is_compile_only as is_compile_only
from jrc._targets.compilers import compiler_versions as compiler_versions
from jrc._targets.device_context import target_device_context as target_device_context
from jrc._targets.quiet import quiet_compiler as quiet_compiler
