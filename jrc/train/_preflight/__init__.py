"""What is checked before a step runs; a file for each thing that may be wrong."""

from jrc.train._preflight.preflight import Preflight as Preflight
