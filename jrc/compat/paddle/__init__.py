"""Paddle's names, in functional form: static configuration is in the object, arrays go in and out.

opt = jrc.compat.RecomputeOptimizer(optax.adam(0.01))
opt._set_checkpoints(["fc_1", "pred"])
params, opt_state, loss, params_grads = opt.minimize(loss_fn, params, opt_state, *batch)
"""

from jrc.compat.paddle._append_backward import append_backward as append_backward
from jrc.compat.paddle._callbacks import Block as Block
from jrc.compat.paddle._callbacks import Operator as Operator
from jrc.compat.paddle._dgc_momentum_optimizer import DGCMomentumOptimizer as DGCMomentumOptimizer
from jrc.compat.paddle._gradients import ParamGrad as ParamGrad
from jrc.compat.paddle._recompute_optimizer import RecomputeOptimizer as RecomputeOptimizer
from jrc.compat.paddle._recompute_sequential import recompute_sequential as recompute_sequential
