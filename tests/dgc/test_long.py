"""A thousand steps, after which the parameters of all replicas are bit-equal."""

import jax.numpy as jnp
import numpy as np
import pytest

from jrc.dgc import Blocked, dgc_momentum
from tests.dgc.replicas import AXIS, normal, trajectory

RATE = 0.05
WAYS = {
    "bf16 blocked sharded": {"wire": "bf16", "selector": Blocked(64), "exchange": "sharded"},
    "int8 global allgather": {"wire": "int8", "selector": "global", "exchange": "allgather"},
}


@pytest.mark.exhaustive(after=1)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_replicas_stay_bit_equal(way):
    params = {"w": jnp.linspace(-1.0, 1.0, 320), "x": jnp.ones(150), "b": jnp.ones(5)}
    gradients = normal(4, params, 1000, 4)
    tx = dgc_momentum(RATE, 0.9, 50, sparsity=0.95, axis_name=AXIS, min_size=100, **WAYS[way])
    path, state = trajectory(tx, params, gradients)
    assert int(state[0].step) == 1000 and int(state[0].skipped) == 0
    for name, leaf in path.items():
        assert np.isfinite(leaf).all()
        for rank in range(1, 4):
            np.testing.assert_array_equal(leaf[:, rank].view(np.uint32), leaf[:, 0].view(np.uint32))
        if name != "b":
            assert (state[0].v[name][0] != state[0].v[name][1]).any()
