"""NumPyro's ELBO with several particles."""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO

from tests.zoo.plain_transformers import drawn
from tests.zoo.program import Program, Remat


def numpyro_vae(toy: bool) -> Program:
    """A variational autoencoder, its ELBO estimated with four particles."""
    pixels, hidden, latent, batch = (32, 16, 4, 64) if toy else (784, 512, 32, 1024)
    params = {
        "encoder": [
            drawn(pixels, hidden),
            drawn(hidden, hidden, seed=1),
            drawn(hidden, 2 * latent),
        ],
        "decoder": [drawn(latent, hidden), drawn(hidden, hidden, seed=2), drawn(hidden, pixels)],
    }

    def net(ws: Any, x: Any) -> Any:
        for w in ws[:-1]:
            x = jax.nn.softplus(x @ w)
        return x @ ws[-1]

    def model(data: Any) -> None:
        ws = [numpyro.param(f"decoder{i}", w) for i, w in enumerate(params["decoder"])]
        with numpyro.plate("batch", batch):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(latent), 1.0).to_event(1))
            pixel = dist.Bernoulli(logits=net(ws, z)).to_event(1)
            numpyro.sample("x", pixel, obs=data)

    def guide(data: Any) -> None:
        ws = [numpyro.param(f"encoder{i}", w) for i, w in enumerate(params["encoder"])]
        with numpyro.plate("batch", batch):
            mean, scale = jnp.split(net(ws, data), 2, axis=-1)
            numpyro.sample("z", dist.Normal(mean, jnp.exp(scale)).to_event(1))

    data = (drawn(batch, pixels) > 0).astype(jnp.float32)
    elbo = Trace_ELBO(num_particles=4)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), elbo)
    given = svi.get_params(svi.init(jax.random.key(0), data))

    def build(remat: Remat) -> Any:
        return lambda params, key, data: elbo.loss(key, params, model, guide, data)

    return Program(build, (given, jax.random.key(1), data), by_hand=False)
