"""Recomputation that fits a memory budget, and deep gradient compression, for JAX."""

from importlib.metadata import version as _version

from jrc import compat as compat
from jrc import models as models
from jrc.dgc import DGCAdvice as DGCAdvice
from jrc.dgc import DGCState as DGCState
from jrc.dgc import DGCStats as DGCStats
from jrc.dgc import ExchangeCost as ExchangeCost
from jrc.dgc import dgc_advice as dgc_advice
from jrc.dgc import dgc_momentum as dgc_momentum
from jrc.dgc import dgc_specs as dgc_specs
from jrc.dgc import dgc_stats as dgc_stats
from jrc.dgc import l1_penalty as l1_penalty
from jrc.dgc import l2_penalty as l2_penalty
from jrc.dgc import reshard_dgc as reshard_dgc
from jrc.dgc import scale_by_dgc as scale_by_dgc
from jrc.outer_optimizers import DiLoCo as DiLoCo
from jrc.outer_optimizers import OuterState as OuterState
from jrc.outer_optimizers import SparseLoCo as SparseLoCo
from jrc.persist import restore as restore
from jrc.persist import save as save
from jrc.remat import BudgetError as BudgetError
from jrc.remat import LargestBatch as LargestBatch
from jrc.remat import Offload as Offload
from jrc.remat import Plan as Plan
from jrc.remat import RecomputePrimitives as RecomputePrimitives
from jrc.remat import Report as Report
from jrc.remat import Save as Save
from jrc.remat import SavePrimitives as SavePrimitives
from jrc.remat import Segment as Segment
from jrc.remat import Segmentation as Segmentation
from jrc.remat import apply_rules as apply_rules
from jrc.remat import explain as explain
from jrc.remat import find_segments as find_segments
from jrc.remat import keep_op as keep_op
from jrc.remat import largest_batch as largest_batch
from jrc.remat import mark as mark
from jrc.remat import plan as plan
from jrc.remat import recompute as recompute
from jrc.remat import recompute_module as recompute_module
from jrc.remat import recompute_op as recompute_op
from jrc.remat import recompute_scan as recompute_scan
from jrc.remat import recompute_segments as recompute_segments
from jrc.remat import recompute_sequential as recompute_sequential
from jrc.train import CommunicationAdvice as CommunicationAdvice
from jrc.train import StepInfo as StepInfo
from jrc.train import TrainState as TrainState
from jrc.train import TrainStep as TrainStep
from jrc.train import WayCost as WayCost
from jrc.train import communication_advice as communication_advice
from jrc.train import init_state as init_state
from jrc.train import make_train_step as make_train_step
from jrc.train import reshard as reshard

__version__ = _version("jrc")
