"""Recomputation: cut a function at named boundaries and re-run what lies between."""

from jrc.remat._apply import recompute_segments as recompute_segments
from jrc.remat._mark import mark as mark
from jrc.remat._recompute import recompute as recompute
from jrc.remat._segment import Segment as Segment
from jrc.remat._segment import Segmentation as Segmentation
from jrc.remat._segment import find_segments as find_segments
