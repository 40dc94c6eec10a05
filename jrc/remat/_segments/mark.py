"""Naming intermediates."""

import jax

from jrc._errors import public
from jrc._jaxpr import bind_mark
from jrc._tree import is_traced


@public("jrc.mark")
def mark[T](x: T, name: str) -> T:
    """Name an intermediate value, so that a program can be cut there.

    The identity: values, gradients, shardings and batching pass through it unchanged, and the
    compiled program does not contain it.

    Args:
        x: Any JAX array (any shape and dtype, typed keys too) or pytree of them. Other leaves,
            NumPy arrays included, are returned unchanged and without a mark.
        name: The name, for instance `"block_0"`. Several values with one name are numbered
            `name`, `name#2`, … in program order, so that a name may not contain `#`.

    Returns:
        `x`.

    Raises:
        TypeError: If `name` is not a string.
        ValueError: If `name` is empty or contains `#`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     h = jrc.mark(jnp.tanh(x @ w), "h")
        ...     return jnp.mean(h**2)
        >>> w, x = jnp.ones((3, 3)), jnp.ones((2, 3))
        >>> jrc.find_segments(loss, ["h"], w, x).held
        ('h',)

    Source: the variables that Paddle's `RecomputeOptimizer._set_checkpoints` takes; JAX's own
    `jax.ad_checkpoint.checkpoint_name` tags are read as marks too.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"name must be a string, got {type(name).__name__} {name!r}. "
            "Write jrc.mark(x, 'block_0')."
        )
    if not name or "#" in name:
        raise ValueError(
            "name must not be empty nor contain '#', which numbers repeated names, "
            f"got {name!r}. Choose another name."
        )
    leaves, treedef = jax.tree.flatten(x)
    marked, count = [], 0
    for leaf in leaves:
        marked.append(bind_mark(leaf, name, count) if is_traced(leaf) else leaf)
        count += is_traced(leaf)
    return treedef.unflatten(marked)
