"""A way to synchronise replicas is one file: signSGD with majority vote is here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jrc
from jrc.train import _synchronisation
from jrc.train._synchronisation import Synchronisation, Traffic
from tests.train.test_step import NET, mesh, net_batch, net_loss


class MajorityVote(Synchronisation):
    """Each replica sends the signs of its gradient, and moves by the sign of their sum."""

    @classmethod
    def of(cls, tx, outer, opt_state):
        return cls(tx) if isinstance(tx, Voted) else None

    def opt_specs(self, state, layout):
        return layout.like_params(state.opt_state, state.params)

    def step(self, program, state, objective, over):
        found = objective.gradient(state.params, state.model_state)
        votes = jax.tree.map(lambda g: over.total(jnp.sign(g).astype(jnp.int8)), found.grads)
        grads = jax.tree.map(lambda x: jnp.sign(x).astype(jnp.float32), votes)
        updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = state._replace(params=params, opt_state=opt_state)
        return state, Traffic(found, over.bytes_of_mean(votes))


class Voted(optax.GradientTransformation):
    """An optimizer for which replicas vote."""


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_a_fourth_way_is_one_file(monkeypatch, via):
    monkeypatch.setattr(_synchronisation, "WAYS", [MajorityVote, *_synchronisation.WAYS])
    tx = Voted(*optax.sgd(0.01))
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(net_loss, tx, mesh=mesh(), via=via)
    params = NET
    for t in range(3):
        batch = net_batch(t)
        each = [jax.grad(net_loss)(params, part, None) for part in np.split(batch, 4)]
        signs = jax.tree.map(lambda *g: jnp.sign(sum(map(jnp.sign, g))), *each)
        params = jax.tree.map(lambda p, s: p - 0.01 * s, params, signs)
        state, info = step(state, batch)
    for name in NET:
        np.testing.assert_allclose(state.params[name], params[name], atol=1e-6)
    size = sum(x.size for x in NET.values())
    assert float(info.bytes_sent) == 2 * 3 / 4 * size  # one byte for an entry


@pytest.mark.slow
def test_the_programs_of_rounds_are_lowered_under_a_budget_too():
    outer, tx = jrc.DiLoCo(sync_every=2), optax.sgd(0.1)
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh(), outer=outer)
    step = jrc.make_train_step(net_loss, tx, mesh=mesh(), outer=outer, memory_budget=1.0)
    inner = step.lower(state, net_batch(0), closing=False).compile().as_text()
    assert "all-reduce(" not in inner
    assert inner == step.lower(state, net_batch(0), number=1).compile().as_text()
    assert "all-reduce(" in step.lower(state, net_batch(0), number=2).compile().as_text()
    with pytest.raises(TypeError, match="options must be 'closing', 'number', got 'numbr'"):
        step.lower(state, net_batch(0), numbr=2)
