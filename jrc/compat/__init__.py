"""The seeds' names: Paddle's recompute and DGC optimizers in functional form, thin over the rest.

Static configuration lives in the object; every array goes in and comes out.
"""

from jrc.compat._backward import append_backward as append_backward
from jrc.compat._block import Block as Block
from jrc.compat._block import Operator as Operator
from jrc.compat._dgc import DGCMomentumOptimizer as DGCMomentumOptimizer
from jrc.compat._gradients import ParamGrad as ParamGrad
from jrc.compat._recompute import RecomputeOptimizer as RecomputeOptimizer
