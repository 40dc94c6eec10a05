"""Wrong calls of `jrc.target`, and wrong targets elsewhere."""

import jax.numpy as jnp

import jrc
from tests.messages.rows import Row


def loss(x):
    return jnp.sum(x)


X = jnp.ones(2)

ROWS = [
    Row(
        "jrc.target", "no such chip", lambda: jrc.target("v5x"), ValueError,
        "must begin with one of v4, v5e", "'v5x'", "Write for instance 'v5e:2x2'",
    ),
    Row(
        "jrc.target", "no such slice", lambda: jrc.target("v5e:3x3"), ValueError,
        "must have one of the slices 1x1, 2x2, 2x4", "got 'v5e:3x3'",
        "Write for instance 'v5e:2x2'",
    ),
    Row(
        "jrc.target", "no such node", lambda: jrc.target("h100:16"), ValueError,
        "must have 1 to 8 devices in a node", "got 'h100:16'", "Write for instance 'h100:8'",
    ),
    Row(
        "jrc.target", "a number", lambda: jrc.target(8), TypeError,
        "name must be text", "got int", "Write jrc.target('v5e:2x2')",
    ),
    *(
        Row(
            f"jrc.{function.__name__}", "a number as target",
            lambda function=function: function(loss, X, budget=1.0, target=8)
            if function is jrc.plan else function(loss, X, target=8),
            TypeError, "target must be a jrc.Target, its name or None", "got int",
            "Write target='v5e:2x2'",
        )
        for function in (jrc.plan, jrc.explain)
    ),
    Row(
        "jrc.largest_batch", "a number as target",
        lambda: jrc.largest_batch(lambda batch: (X,), loss, "1GiB", target=8), TypeError,
        "target must be a jrc.Target, its name or None", "got int", "Write target='v5e:2x2'",
    ),
]  # fmt: skip
