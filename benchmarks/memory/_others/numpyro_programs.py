"""Posteriors of NumPyro, differentiated as HMC does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan
from numpyro.infer.util import log_density

from tests.zoo.plain_transformers import drawn
from tests.zoo.program import Program, Remat


def numpyro_network(toy: bool) -> Program:
    """The log-density of a Bayesian network over examples, for four chains in a vmap."""
    batch, width, layers = (8, 8, 2) if toy else (2048, 128, 4)
    x, y = drawn(batch, width), drawn(batch, seed=1)

    def model(x: Any, y: Any) -> None:
        for i in range(layers):
            normal = dist.Normal(0, width**-0.5).expand([width, width]).to_event(2)
            x = x + jnp.tanh(x @ numpyro.sample(f"w{i}", normal))
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("examples", batch):
            numpyro.sample("y", dist.StudentT(4.0, jnp.mean(x, -1), scale), obs=y)

    params = {f"w{i}": drawn(4, width, width, seed=i) for i in range(layers)}
    params["scale"] = jnp.ones(4)

    def build(remat: Remat) -> Any:
        def loss(params: Any, x: Any, y: Any) -> Any:
            return -jnp.sum(jax.vmap(lambda p: log_density(model, (x, y), {}, p)[0])(params))

        return loss

    return Program(build, (params, x, y), by_hand=False)


def numpyro_series(toy: bool) -> Program:
    """A state space model: NumPyro's own scan over time, many series side by side."""
    series, steps, width = (4, 4, 4) if toy else (256, 128, 32)
    observed = drawn(steps, series, width)

    def model(observed: Any) -> None:
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([width, width]).to_event(2))

        def transition(state: Any, y: Any) -> Any:
            state = jnp.tanh(state @ weights) + 0.5 * state
            with numpyro.plate("series", series):
                numpyro.sample("y", dist.Normal(state, 1.0).to_event(1), obs=y)
            return state, None

        scan(transition, jnp.zeros((series, width)), observed)

    params = {"weights": drawn(width, width)}

    def build(remat: Remat) -> Any:
        def loss(params: Any, observed: Any) -> Any:
            return -log_density(model, (observed,), {}, params)[0] / observed.size

        return loss

    return Program(build, (params, observed), by_hand=False)
