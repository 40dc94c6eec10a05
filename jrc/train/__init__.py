"""The train step: a loss function and an optimizer, with recomputation and compression.

Example:
    state = jrc.init_state(params, tx, key)
    step = jrc.make_train_step(loss_fn, tx, memory_budget="16GiB")
    state, info = step(state, batch)
"""

from jrc.train._flush import flush as flush
from jrc.train._init_state import init_state as init_state
from jrc.train._replica import StepInfo as StepInfo
from jrc.train._reshard import reshard as reshard
from jrc.train._state import TrainState as TrainState
from jrc.train._step import TrainStep as TrainStep
from jrc.train._step import make_train_step as make_train_step
