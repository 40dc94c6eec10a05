"""Normalising flows of distrax."""

from typing import Any

import distrax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo.plain_transformers import drawn
from tests.zoo.program import Program, Remat


def distrax_flow(toy: bool) -> Program:
    """Coupling layers of rational-quadratic splines, as in the authors' example."""
    batch, size, layers, hidden, bins = (8, 4, 2, 8, 4) if toy else (1024, 64, 6, 256, 8)
    count = 3 * bins + 1

    def flow(remat: Remat) -> Any:
        def conditioner() -> Any:
            net = hk.Sequential(
                [
                    hk.nets.MLP([hidden, hidden], activate_final=True),
                    hk.Linear(size * count, w_init=hk.initializers.RandomNormal(0.01)),
                    hk.Reshape((size, count), preserve_dims=-1),
                ]
            )
            return net if remat is None else hk.remat(net, **remat)

        mask, found = jnp.arange(size) % 2 == 0, []
        for _ in range(layers):
            found.append(
                distrax.MaskedCoupling(
                    mask=mask,
                    bijector=lambda p: distrax.RationalQuadraticSpline(p, -3.0, 3.0),
                    conditioner=conditioner(),
                )
            )
            mask = ~mask
        base = distrax.Independent(
            distrax.Normal(np.zeros(size, np.float32), np.ones(size, np.float32)), 1
        )
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(found)))

    x = 2 * drawn(batch, size)
    params = hk.transform(lambda x: flow(None).log_prob(x)).init(jax.random.key(0), x)

    def build(remat: Remat) -> Any:
        net = hk.without_apply_rng(hk.transform(lambda x: flow(remat).log_prob(x)))
        return lambda params, x: -jnp.mean(net.apply(params, x))

    return Program(build, (params, x))
