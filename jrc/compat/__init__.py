"""Paddle's and MindSpore's names, in functional form, thin over the rest of `jrc`.

    opt = jrc.compat.RecomputeOptimizer(optax.adam(0.01))
    opt._set_checkpoints(["fc_1", "pred"])
    params, opt_state, loss, params_grads = opt.minimize(loss_fn, params, opt_state, *batch)

Static configuration is in the object. Every array is an argument or a result.
"""

from jrc.compat._backward import append_backward as append_backward
from jrc.compat._block import Block as Block
from jrc.compat._block import Operator as Operator
from jrc.compat._dgc import DGCMomentumOptimizer as DGCMomentumOptimizer
from jrc.compat._gradients import ParamGrad as ParamGrad
from jrc.compat._mindspore import recompute_cell as recompute_cell
from jrc.compat._mindspore import recompute_primitive as recompute_primitive
from jrc.compat._recompute import RecomputeOptimizer as RecomputeOptimizer
from jrc.compat._sequential import recompute_sequential as recompute_sequential
