"""Paddle's and MindSpore's names, in functional form, thin over the rest of `jrc`."""

from jrc.compat.mindspore import recompute_cell as recompute_cell
from jrc.compat.mindspore import recompute_primitive as recompute_primitive
from jrc.compat.paddle import Block as Block
from jrc.compat.paddle import DGCMomentumOptimizer as DGCMomentumOptimizer
from jrc.compat.paddle import Operator as Operator
from jrc.compat.paddle import ParamGrad as ParamGrad
from jrc.compat.paddle import RecomputeOptimizer as RecomputeOptimizer
from jrc.compat.paddle import append_backward as append_backward
from jrc.compat.paddle import recompute_sequential as recompute_sequential
