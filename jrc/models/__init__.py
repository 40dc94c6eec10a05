"""Models as pure functions with explicit keys; what may be a boundary is marked.

Each module has `Config`, `init(key, config)`, `apply(params, x, config, *, key=None)` and
`loss(params, batch, key=None, *, config)`, the last in the form that `jrc.make_train_step` takes.
"""

from jrc.models import gpt as gpt
from jrc.models import mlp as mlp
