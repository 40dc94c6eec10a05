"""Recomputation that a user writes by hand, for a loss that takes its `through` as an argument.

`through(model, x)` runs `model.blocks` on `x`; of a scanned loss it is the loop itself, called like
`jax.lax.scan`. The policies are names and JAX's own, which `jax_remat3` supports too. "dots" is
JAX's policy `dots_saveable`, "unbatched dots" is `dots_with_no_batch_dims_saveable`; to JAX 0.11 a
convolution is not a dot.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

EACH = "every block re-run"
DOTS = "dots per block"
UNBATCHED = "unbatched dots per block"
ROOT = "sqrt(N) blocks"
NAMES = "whole loss, names"

_BLOCK = "block"
_POLICIES = {
    EACH: None,
    DOTS: jax.checkpoint_policies.dots_saveable,
    UNBATCHED: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def in_turn(model: Any, x: Any) -> Any:
    """Run the blocks in order, with nothing recomputed."""
    for block in model.blocks:
        x = block(x)
    return x


def regions(
    loss: Callable[..., Any], blocks: int, remat: Callable[..., Any] | None = None
) -> Mapping[str, Callable[..., Any]]:
    """Return the ways by hand for a loss whose layers are unrolled.

    Args:
        loss: The loss, which takes `through`.
        blocks: How many blocks there are.
        remat: Makes a recomputed region of a function `(model, x)`: flax's own `remat` for its
            modules, else `jax.checkpoint`.

    Returns:
        The loss in each way, by name.
    """
    remat = remat or _closed
    found = {name: _by_size(remat, 1, policy=policy) for name, policy in _POLICIES.items()}
    found[ROOT] = _by_size(remat, math.ceil(blocks / round(math.sqrt(blocks))))
    ways = {name: functools.partial(loss, through=way) for name, way in found.items()}
    return ways | {NAMES: _whole(functools.partial(loss, through=_named))}


def _closed(run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a region that closes over the model: blocks of pure functions are not arrays."""
    return lambda model, x: jax.checkpoint(functools.partial(run, model), **options)(x)


def _by_size(remat: Callable[..., Any], size: int, **options: Any) -> Callable[..., Any]:
    def through(model: Any, x: Any) -> Any:
        for start in range(0, len(model.blocks), size):
            x = remat(_part(start, start + size), **options)(model, x)
        return x

    return through


def _part(start: int, stop: int) -> Callable[..., Any]:
    def run(model: Any, x: Any) -> Any:
        for block in model.blocks[start:stop]:
            x = block(x)
        return x

    return run


def _named(model: Any, x: Any) -> Any:
    for block in model.blocks:
        x = _with_name(block(x), but=x)
    return x


def _with_name(tree: Any, but: Any = None) -> Any:
    """Name the leaves that a block computes; those it only passes on have a name already."""
    old = {id(leaf) for leaf in jax.tree.leaves(but)}
    return jax.tree.map(lambda x: x if id(x) in old else checkpoint_name(x, _BLOCK), tree)


def _whole(loss: Callable[..., Any]) -> Callable[..., Any]:
    policy = jax.checkpoint_policies.save_only_these_names(_BLOCK)
    return jax.checkpoint(loss, policy=policy)


def loops(loss: Callable[..., Any], steps: int) -> Mapping[str, Callable[..., Any]]:
    """Return the ways by hand for a loss whose layers are one loop of `steps` iterations."""
    found = {name: each_iteration(policy) for name, policy in _POLICIES.items()}
    found[ROOT] = functools.partial(_two_loops, rounds=_near_root(steps))
    ways = {name: functools.partial(loss, through=way) for name, way in found.items()}
    return ways | {NAMES: _whole(functools.partial(loss, through=_named_loop))}


def _near_root(steps: int) -> int:
    """Return the divisor of `steps` that is nearest to its square root."""
    divisors = (n for n in range(1, steps + 1) if steps % n == 0)
    return min(divisors, key=lambda n: abs(n - math.sqrt(steps)))


def each_iteration(policy: Any) -> Callable[..., Any]:
    """Return a `jax.lax.scan` whose body is recomputed under a policy."""
    # In a loop XLA cannot merge the two computations of the body, so no barrier is needed.
    return lambda body, carry, xs: jax.lax.scan(
        jax.checkpoint(body, policy=policy, prevent_cse=False), carry, xs
    )


def _two_loops(body: Callable[..., Any], carry: Any, xs: Any, rounds: int) -> Any:
    xs = jax.tree.map(lambda x: x.reshape(rounds, -1, *x.shape[1:]), xs)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def segment(carry: Any, xs: Any) -> Any:
        return jax.lax.scan(body, carry, xs)

    carry, ys = jax.lax.scan(segment, carry, xs)
    return carry, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys)


def _named_loop(body: Callable[..., Any], carry: Any, xs: Any) -> Any:
    def named(carry: Any, x: Any) -> Any:
        carry, y = body(carry, x)
        return _with_name(carry), y

    return jax.lax.scan(named, carry, xs)
