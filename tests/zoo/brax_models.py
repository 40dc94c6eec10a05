"""Brax's PPO loss, through `functools.partial`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from brax.training.acme import running_statistics
from brax.training.agents.ppo import losses, networks
from brax.training.types import Transition

from tests.zoo.plain_transformers import drawn
from tests.zoo.program import Program, Remat


def brax_ppo(toy: bool) -> Program:
    """PPO with networks of four and five hidden layers."""
    batch, steps, observed, actions = (8, 4, 8, 2) if toy else (256, 20, 64, 8)
    width = 16 if toy else 256
    net = networks.make_ppo_networks(
        observed, actions, running_statistics.normalize,
        policy_hidden_layer_sizes=(width,) * 4, value_hidden_layer_sizes=(width,) * 5,
    )  # fmt: skip
    key = jax.random.key(0)
    params = losses.PPONetworkParams(net.policy_network.init(key), net.value_network.init(key))
    seen = drawn(batch, steps, observed)
    ones = jnp.ones((batch, steps))
    data = Transition(
        observation=seen,
        action=drawn(batch, steps, actions),
        reward=drawn(batch, steps, seed=1),
        discount=ones,
        next_observation=seen + 0.1,
        extras={
            "state_extras": {"truncation": 0 * ones},
            "policy_extras": {
                "raw_action": drawn(batch, steps, actions),
                "log_prob": drawn(batch, steps, seed=2),
                "value": drawn(batch, steps, seed=3),
                "distribution_params": drawn(batch, steps, 2 * actions, seed=4),
            },
        },
    )
    normalizer = running_statistics.init_state(jax.ShapeDtypeStruct((observed,), jnp.float32))
    loss = functools.partial(losses.compute_ppo_loss, ppo_network=net, entropy_cost=1e-2)

    def build(remat: Remat) -> Any:
        return loss

    args = (params, normalizer, data, jax.random.key(1))
    return Program(build, args, has_aux=True, by_hand=False)
