"""The functional train step: recomputation and compression joined."""

from jrc.train._replica import StepInfo as StepInfo
from jrc.train._state import TrainState as TrainState
from jrc.train._state import init_state as init_state
from jrc.train._step import TrainStep as TrainStep
from jrc.train._step import make_train_step as make_train_step
