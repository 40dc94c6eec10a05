"""Recomputation that fits a memory budget, and deep gradient compression, for JAX."""

from jrc.remat import Segment as Segment
from jrc.remat import Segmentation as Segmentation
from jrc.remat import find_segments as find_segments
from jrc.remat import mark as mark
from jrc.remat import recompute as recompute
from jrc.remat import recompute_segments as recompute_segments
