"""Steps over chunks: in a loop, or one after another in the program.

>>> import jax.numpy as jnp
>>> add = lambda total, x, weight: (total + weight * x, x * x)
>>> for steps in (in_loop, in_turn):
...     total, squares = steps(add, 0, jnp.arange(4), 2)
...     print(total, squares)
12 [0 1 4 9]
12 [0 1 4 9]
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrc.remat._region.barrier import barrier

Body = Callable[[Any, Any, Any], tuple[Any, Any]]
"""From what is carried, a slice and what each step reads whole to what is carried and stacked."""
Scan = Callable[[Body, Any, Any, Any], tuple[Any, Any]]
"""What runs the steps of a body: its arguments are those of `in_loop`."""


def in_loop(body: Body, start: Any, xs: Any, whole: Any) -> tuple[Any, Any]:
    """Return what steps carry at last, and their results, stacked, by `jax.lax.scan`.

    Args:
        body: One step.
        start: What is carried, at first.
        xs: Arrays with a leading axis of steps.
        whole: What each step reads whole.
    """
    return jax.lax.scan(lambda state, x: body(state, x, whole), start, xs)


def in_turn(body: Body, start: Any, xs: Any, whole: Any) -> tuple[Any, Any]:
    """Return what `in_loop` does, by steps in the program of which each waits for the last.

    Without barriers XLA would compute them side by side, and need the memory of all. What they read
    whole passes them too, so that backwards a step waits for the gradients of the next one.

    Args:
        body: As for `in_loop`.
        start: Likewise.
        xs: Likewise.
        whole: Likewise.
    """
    state, made = start, list[Any]()
    for i in range(len(jax.tree.leaves(xs)[0])):
        x = jax.tree.map(lambda x, i=i: jax.lax.index_in_dim(x, i, keepdims=False), xs)
        state, x, whole, last = barrier((state, x, whole, made[-1:]))
        state, out = body(state, x, whole)
        made[-1:] = [*last, out]
    return state, jax.tree.map(lambda *each: jnp.stack(each), *made)
