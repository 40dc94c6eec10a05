"""Second derivatives and per-example gradients of networks of flax."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.plain_transformers import drawn
from tests.zoo.program import Program, Remat


class _Net(nn.Module):
    """An MLP whose layers stand under `nn.remat`, or do not."""

    width: int
    layers: int
    remat: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        dense = nn.Dense if self.remat is None else nn.remat(nn.Dense, **dict(self.remat))
        for i in range(self.layers):
            x = x + nn.tanh(dense(self.width, name=f"layer_{i}")(x))
        return nn.Dense(16, name="head")(x)


def _made(toy: bool) -> tuple[Any, Any, Any, Any]:
    batch, width, layers = (8, 8, 2) if toy else (2048, 256, 8)

    def net_of(remat: Remat) -> Any:
        return _Net(width, layers, None if remat is None else tuple(remat.items()))

    x, labels = drawn(batch, width), jnp.arange(batch) % 16
    return net_of, net_of(None).init(jax.random.key(0), x), x, labels


def hessian(toy: bool) -> Program:
    """The gradient of a Hessian-vector product's norm: curvature as a regularizer."""
    net_of, params, x, labels = _made(toy)
    vector = jax.tree.map(jnp.ones_like, params)

    def build(remat: Remat) -> Any:
        net = net_of(remat)

        def loss(params: Any, x: Any, labels: Any) -> Any:
            def of(params: Any) -> Any:
                logits = net.apply(params, x)
                return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

            value, product = jax.jvp(jax.grad(of), (params,), (vector,))
            return of(params) + optax.tree.norm(product, squared=True)

        return loss

    return Program(build, (params, x, labels))


def per_example(toy: bool) -> Program:
    """The loss of gradients that are clipped for each example, differentiated."""
    net_of, params, x, labels = _made(toy)
    x, labels = (x[:256], labels[:256]) if not toy else (x, labels)

    def build(remat: Remat) -> Any:
        net = net_of(remat)

        def loss(params: Any, x: Any, labels: Any) -> Any:
            def of(params: Any, x: Any, label: Any) -> Any:
                logits = net.apply(params, x[None])[0]
                return optax.softmax_cross_entropy_with_integer_labels(logits, label)

            values, found = jax.vmap(jax.value_and_grad(of), (None, 0, 0))(params, x, labels)
            squares = sum(jnp.sum(g**2, axis=range(1, g.ndim)) for g in jax.tree.leaves(found))
            return jnp.mean(values) + 1e-2 * jnp.mean(jnp.sqrt(squares))

        return loss

    return Program(build, (params, x, labels))
