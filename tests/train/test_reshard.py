"""The whole round: train, save, restore on other devices, share out, and train on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jrc
from tests.train.tasks import dgc, start


def on(devices):
    return Mesh(jax.devices()[:devices], ("data",))


def local_means(state, replicas):
    """Means over the replicas of all that they have of their own."""
    specs = jax.tree.leaves(jrc.dgc_specs(state, "data"))
    pairs = zip(jax.tree.leaves(state), specs, strict=True)
    own = [np.asarray(x, np.float64) for x, spec in pairs if spec != jax.sharding.PartitionSpec()]
    return [x.reshape(replicas, -1).mean(0) for x in own]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Five steps on four replicas: past the ramp-up's begin, something is kept back."""
    path = tmp_path_factory.mktemp("saved")
    state, step, batch = start("digits", dgc())
    for i in range(5):
        state, info = step(state, batch(i))
    jrc.save(path, state)
    assert float(info.norm_kept) > 0
    return path, state


@pytest.mark.exhaustive(after=1)
@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8, 3, 1])
def test_a_run_goes_on_with_another_number_of_replicas(saved, devices):
    path, old = saved
    tx = dgc()
    mesh = on(devices)
    fresh, step, batch = start("digits", tx, on=mesh)
    like = jrc.reshard_dgc(jax.eval_shape(lambda: fresh), 4, mesh=mesh)
    restored = jrc.restore(path, like)
    for got, want in zip(
        jax.tree.leaves(local_means(restored, 4)), local_means(old, 4), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    state = jrc.reshard_dgc(restored, devices, mesh=mesh)
    avals = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)  # noqa: E731
    assert avals(state) == avals(fresh)
    assert state.opt_state[0].v["fc_1"]["w"].shape[0] == devices
    for got, want in zip(local_means(state, devices), local_means(old, 4), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max() + 1e-12)
    losses = []
    for i in range(5, 45):
        x, y = batch(i)
        rows = len(x) // devices * devices
        state, info = step(state, (x[:rows], y[:rows]))
        losses.append(float(info.loss))
    assert int(state.step) == 45 and int(state.opt_state[0].step) == 45
    assert np.isfinite(losses).all() and np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


@pytest.mark.slow
def test_everything_is_sent_in_the_end_whatever_the_number_of_replicas(saved):
    """With gradients of zero, no momentum, and all sent: the update is the mean kept back."""
    _, old = saved
    loss = lambda params, batch, key: 0.0 * sum(x.sum() for x in jax.tree.leaves(params))  # noqa: E731
    tx = jrc.dgc_momentum(1.0, 0.0, 0, sparsity=0.0, min_size=1000, axis_name="data")
    moved = []
    for devices in (4, 2, 8, 3):
        mesh = on(devices)
        own = jax.tree.map(jnp.copy, old)  # the step donates what it is given
        state = jrc.reshard_dgc(own, devices, mesh=mesh)
        before = jax.tree.map(np.array, state.params)
        step = jrc.make_train_step(loss, tx, mesh=mesh)
        state, _ = step(state, np.zeros(devices, np.float32))
        moved.append(jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, before))
    assert max(np.abs(x).max() for x in jax.tree.leaves(moved[0])) > 1e-3
    for other in moved[1:]:
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(moved[0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.exhaustive
def test_gathered_gradients_go_along(tmp_path):
    tx = optax.MultiSteps(dgc(), 2)
    state, step, batch = start("digits", tx)
    for i in range(5):
        state, _ = step(state, batch(i))
    jrc.save(tmp_path, state)
    fresh, step, _ = start("digits", tx, on=on(2))
    like = jrc.reshard_dgc(jax.eval_shape(lambda: fresh), 4, mesh=on(2))
    other = jrc.reshard_dgc(jrc.restore(tmp_path, like), 2, mesh=on(2))
    assert max(np.abs(x).max() for x in jax.tree.leaves(other.opt_state.acc_grads)) > 0
    for got, want in zip(local_means(other, 2), local_means(state, 4), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max() + 1e-12)
    other, info = step(other, batch(5))
    assert int(other.step) == 6 and np.isfinite(float(info.loss))
