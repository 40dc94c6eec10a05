"""Recomputation: cut a function at named boundaries and re-run what lies between."""

from jrc.remat._apply import recompute_segments as recompute_segments
from jrc.remat._apply_rules import apply_rules as apply_rules
from jrc.remat._batch import LargestBatch as LargestBatch
from jrc.remat._batch import largest_batch as largest_batch
from jrc.remat._budget import BudgetError as BudgetError
from jrc.remat._budget import checked_budget as checked_budget
from jrc.remat._keep import Offload as Offload
from jrc.remat._keep import RecomputePrimitives as RecomputePrimitives
from jrc.remat._keep import Rule as Rule
from jrc.remat._keep import Save as Save
from jrc.remat._keep import SavePrimitives as SavePrimitives
from jrc.remat._mark import mark as mark
from jrc.remat._module import recompute_module as recompute_module
from jrc.remat._plan import Estimate as Estimate
from jrc.remat._plan import Plan as Plan
from jrc.remat._planner import plan as plan
from jrc.remat._planner import plan_within as plan_within
from jrc.remat._recompute import recompute as recompute
from jrc.remat._scan import recompute_scan as recompute_scan
from jrc.remat._segment import Segment as Segment
from jrc.remat._segment import Segmentation as Segmentation
from jrc.remat._segment import find_segments as find_segments
from jrc.remat._sequential import recompute_sequential as recompute_sequential
from jrc.remat._tags import keep_op as keep_op
from jrc.remat._tags import recompute_op as recompute_op
