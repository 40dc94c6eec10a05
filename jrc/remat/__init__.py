"""Recomputation: cut a function at named boundaries and re-run what lies between."""

from jrc.remat._flax.recompute_module import recompute_module as recompute_module
from jrc.remat._gradient.compiled_memory import Memory as Memory
from jrc.remat._gradient.compiled_memory import device_of as device_of
from jrc.remat._gradient.compiled_memory import memory_needed as memory_needed
from jrc.remat._planner.budget import BudgetError as BudgetError
from jrc.remat._planner.budget import checked_budget as checked_budget
from jrc.remat._planner.costs.host_link import check_offload as check_offload
from jrc.remat._planner.costs.host_link import host_link as host_link
from jrc.remat._planner.largest_batch import LargestBatch as LargestBatch
from jrc.remat._planner.largest_batch import largest_batch as largest_batch
from jrc.remat._planner.make_plan import plan as plan
from jrc.remat._planner.make_plan import plan_for_each as plan_for_each
from jrc.remat._planner.plan.plan import Plan as Plan
from jrc.remat._planner.plan.plan_candidates import Estimate as Estimate
from jrc.remat._planner.plan_within import plan_within as plan_within
from jrc.remat._planner.search.compilations import (
    checked_compilations as checked_compilations,
)
from jrc.remat._policy.rules import Offload as Offload
from jrc.remat._policy.rules import RecomputePrimitives as RecomputePrimitives
from jrc.remat._policy.rules import Rule as Rule
from jrc.remat._policy.rules import Save as Save
from jrc.remat._policy.rules import SavePrimitives as SavePrimitives
from jrc.remat._report.explain import explain as explain
from jrc.remat._report.plot import check_picture as check_picture
from jrc.remat._report.plot import check_writable as check_writable
from jrc.remat._report.report import Report as Report
from jrc.remat._scan.recompute_scan import recompute_scan as recompute_scan
from jrc.remat._segments.apply_rules import apply_rules as apply_rules
from jrc.remat._segments.mark import mark as mark
from jrc.remat._segments.op_tags import keep_op as keep_op
from jrc.remat._segments.op_tags import recompute_op as recompute_op
from jrc.remat._segments.recompute_call import recompute as recompute
from jrc.remat._segments.recompute_segments import recompute_segments as recompute_segments
from jrc.remat._segments.recompute_sequential import recompute_sequential as recompute_sequential
from jrc.remat._segments.segmentation import Segment as Segment
from jrc.remat._segments.segmentation import Segmentation as Segmentation
from jrc.remat._segments.segmentation import find_segments as find_segments
