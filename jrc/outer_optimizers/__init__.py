"""Outer optimizers: replicas train on their own for some steps, then exchange what they changed.

`SparseLoCo` sends few entries of the difference in few bits and keeps the rest for later;
`DiLoCo` sends all of it and has momentum. Both are frozen values for `outer=` of
`jrc.init_state` and `jrc.make_train_step`. There is no collective in this package: an outer
optimizer turns a replica's difference into a message, and the messages of all replicas into new
shared parameters.
"""

from jrc.outer_optimizers._diloco import DiLoCo as DiLoCo
from jrc.outer_optimizers._protocol import Encoded as Encoded
from jrc.outer_optimizers._protocol import OuterOptimizer as OuterOptimizer
from jrc.outer_optimizers._sparseloco import SparseLoCo as SparseLoCo
from jrc.outer_optimizers._state import LocalState as LocalState
from jrc.outer_optimizers._state import OuterState as OuterState
from jrc.outer_optimizers._state import RoundReport as RoundReport
