"""Recomputation that fits a memory budget, and deep gradient compression, for JAX."""

from jrc import models as models
from jrc.dgc import DGCState as DGCState
from jrc.dgc import DGCStats as DGCStats
from jrc.dgc import dgc_momentum as dgc_momentum
from jrc.dgc import dgc_specs as dgc_specs
from jrc.dgc import dgc_stats as dgc_stats
from jrc.dgc import scale_by_dgc as scale_by_dgc
from jrc.persist import restore as restore
from jrc.persist import save as save
from jrc.remat import Segment as Segment
from jrc.remat import Segmentation as Segmentation
from jrc.remat import find_segments as find_segments
from jrc.remat import mark as mark
from jrc.remat import recompute as recompute
from jrc.remat import recompute_segments as recompute_segments
from jrc.train import StepInfo as StepInfo
from jrc.train import TrainState as TrainState
from jrc.train import TrainStep as TrainStep
from jrc.train import init_state as init_state
from jrc.train import make_train_step as make_train_step
