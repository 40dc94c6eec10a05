"""Models as pure functions with explicit keys; every possible boundary is marked.

Each module has `Config`, `init(key, config)`, `apply(params, x, config, *, key=None)` and
`loss(params, batch, key=None, *, config)`, the last in the form that `jrc.make_train_step` takes.
`resnet` also has a model state: `init` returns `(params, state)`, and `apply` and `loss` take the
state after the parameters and return the new one.
"""

from jrc.models import gpt as gpt
from jrc.models import mlp as mlp
from jrc.models import resnet as resnet
