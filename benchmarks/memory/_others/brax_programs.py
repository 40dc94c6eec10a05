"""Brax's physics, differentiated through an episode, as analytic policy gradients need it."""

from typing import Any

import jax
import jax.numpy as jnp
from brax import envs
from brax.training import networks

from tests.zoo.program import Program, Remat, wrapped


def brax_rollout(toy: bool) -> Program:
    """A policy's return over steps of the half cheetah (spring), many at once."""
    batch, steps = (2, 2) if toy else (256, 16)
    env = envs.get_environment("halfcheetah", backend="spring")
    policy = networks.make_policy_network(
        env.action_size, env.observation_size, hidden_layer_sizes=(8,) if toy else (64, 64)
    )
    params = policy.init(jax.random.key(0))
    start = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(1), batch))

    def build(remat: Remat) -> Any:
        def step(state: Any, params: Any) -> Any:
            action = jnp.tanh(policy.apply((), params, state.obs))
            return jax.vmap(env.step)(state, action)

        run = wrapped(step, remat)

        def loss(params: Any, start: Any) -> Any:
            def body(state: Any, _: Any) -> Any:
                state = run(state, params)
                return state, state.reward

            return -jnp.mean(jax.lax.scan(body, start, None, length=steps)[1])

        return loss

    return Program(build, (params, start))
