"""MindSpore's switches: which operators and collectives the gradient runs again."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jrc
from jrc import compat
from tests.remat.measure import operators

MESH = Mesh(jax.devices()[:4], ("data",))


class Block(nn.Module):
    """A block whose weight is sharded by rows and whose activations are summed over the axis."""

    @nn.compact
    def __call__(self, x):
        shard = self.param("w", nn.initializers.ones, (2, 8))
        w = jax.lax.all_gather(shard, "data", axis=0, tiled=True)
        x = jax.lax.psum(jnp.sin(jnp.tanh(x @ w)), "data")
        return jnp.cos(x) @ w


def rerun(block):
    """How often the gradient runs tanh, all_gather and psum beyond the plain block's."""

    def counts(module):
        def gradient(w, x):
            loss = lambda w: jnp.mean(module.apply({"params": {"w": w}}, x) ** 2)  # noqa: E731
            return jax.grad(loss)(w)

        specs = dict(in_specs=P("data"), out_specs=P("data"), check_vma=False)
        step = jax.shard_map(gradient, mesh=MESH, **specs)
        return operators(step, jnp.ones((8, 8)), jnp.ones((8, 8)))

    found, plain = counts(block), counts(Block())
    return tuple(found[name] - plain[name] for name in ("tanh", "all_gather", "psum"))


@pytest.mark.parametrize(
    "switches, expected",
    [
        ({}, (1, 1, 1)),
        ({"mp_comm_recompute": False}, (1, 0, 0)),
        ({"parallel_optimizer_comm_recompute": True}, (1, 1, 1)),
        ({"mp_comm_recompute": True, "parallel_optimizer_comm_recompute": False}, (1, 0, 1)),
        ({"mp_comm_recompute": False, "parallel_optimizer_comm_recompute": True}, (1, 1, 0)),
    ],
    ids=str,
)
def test_the_two_switches_of_a_cell_are_separate(switches, expected):
    assert rerun(compat.recompute_cell(Block(), **switches)) == expected


def test_a_cell_without_collectives():
    dense = compat.recompute_cell(nn.Dense(2))
    params = dense.init(jax.random.key(0), jnp.ones((1, 3)))
    assert dense.apply(params, jnp.ones((1, 3))).shape == (1, 2)
    apart = compat.recompute_cell(nn.Dense(2), parallel_optimizer_comm_recompute=False)
    with pytest.raises(ValueError, match="all_gather"):
        apart.init(jax.random.key(0), jnp.ones((1, 3)))


def test_a_primitive_is_recomputed_or_kept():
    def tanhs(mode):
        tanh = compat.recompute_primitive(jnp.tanh, mode)
        block = lambda w, x: jnp.sin(tanh(x @ w) @ w)  # noqa: E731
        loss = lambda w, x: jrc.recompute(block, w, x).sum()  # noqa: E731
        return operators(jax.grad(loss), jnp.ones((3, 3)), jnp.ones((2, 3)))["tanh"]

    assert tanhs(False) == 1 and tanhs(True) > 1
