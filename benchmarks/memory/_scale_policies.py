"""A scanned GPT with named intermediates, and how users of JAX recompute its blocks without jrc.

The names stand where MaxText puts them, and the policies that save some of them have MaxText's
names (its `get_remat_policy`). A name alone changes nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks._models.by_hand import each_iteration
from benchmarks._private import cross_entropy, dense, layer_norm
from jrc.models import gpt

QKV, CONTEXT, OUT, UP, DOWN = "qkv_proj", "context", "out_proj", "mlpwi", "mlpwo"
SAVED: Mapping[str, tuple[str, ...]] = {
    "minimal_with_context": (QKV, CONTEXT, OUT, UP, DOWN),
    "minimal": (QKV, OUT, UP, DOWN),
    "save_dot_with_context_except_mlp": (QKV, CONTEXT, OUT),
    "save_dot_except_mlpwi": (QKV, OUT, DOWN),
    "save_dot_except_mlp": (QKV, OUT),
    "save_qkv_proj": (QKV,),
    "save_out_proj": (OUT,),
}
"""MaxText's policies, and the names that each saves of a block with one product for q, k, v."""

PLAIN, FULL = "baseline", "full"
policies = jax.checkpoint_policies
SAVED_BY: Mapping[str, Any] = {
    "dots_saveable": policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
    **{name: policies.save_only_these_names(*saved) for name, saved in SAVED.items()},
    FULL: None,
}
"""JAX's policy for a block by each name."""
POLICIES: Mapping[str, Callable[..., Any]] = {
    PLAIN: jax.lax.scan,
    **{name: each_iteration(policy) for name, policy in SAVED_BY.items()},
}
"""The loop over the blocks under each policy, called like `jax.lax.scan`."""


def loss(params: Any, batch: Any, *, config: gpt.Config, loop: Callable[..., Any]) -> Any:
    """Return what `gpt.loss` of a scanned model returns."""
    x = gpt.embed(params, batch[:, :-1], config)
    step = lambda x, layer: (block(layer, x, config), None)  # noqa: E731
    x, _ = loop(step, x, params["blocks"])
    return cross_entropy(gpt.unembed(params, x), batch[:, 1:])


def block(params: Any, x: Any, config: gpt.Config, causal: bool = True) -> Any:
    """Return what `gpt.block` returns without dropout; intermediates are named."""
    mixed = _attention(params, layer_norm(params["norm_1"], x), config, causal)
    x = x + checkpoint_name(mixed, OUT)
    up = checkpoint_name(dense(params["up"], layer_norm(params["norm_2"], x)), UP)
    return x + checkpoint_name(dense(params["down"], jax.nn.gelu(up)), DOWN)


def _attention(params: Any, x: Any, config: gpt.Config, causal: bool) -> Any:
    batch, length, width = x.shape
    size = width // config.heads
    heads = checkpoint_name(dense(params["qkv"], x), QKV)
    q, k, v = jnp.moveaxis(heads.reshape(batch, length, 3, config.heads, size), 2, 0)
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / size**0.5
    if causal:
        seen = jnp.tril(jnp.ones((length, length), bool))[None, None]
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bhqk,bkhc->bqhc", weights, v).reshape(batch, length, width)
    return dense(params["out"], checkpoint_name(mixed, CONTEXT))
