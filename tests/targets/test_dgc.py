"""What the compilers of accelerators make of a step of compression."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jrc
from benchmarks.dgc.accelerators import compiled, counts_of, row_of
from jrc.dgc._internal import gather
from tests.targets.test_target import needs_cuda, needs_libtpu


@needs_libtpu
@pytest.mark.parametrize("words", [33, 4193, 12_001])
def test_a_gather_on_a_tpu_stays_a_gather(words):
    """Along the leading dimension libtpu makes an all-reduce of these sizes."""
    mesh = Mesh(np.asarray(jrc.target("v5e:2x2").devices), ("d",), axis_types=(AxisType.Auto,))
    run = jax.jit(
        jax.shard_map(lambda x: gather(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    )
    text = run.lower(jax.ShapeDtypeStruct((4 * words,), jnp.uint32)).compile().as_text()
    assert counts_of(text) == {"all-gather": 1, "sorted": []}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["exact", "sharded"])
@pytest.mark.parametrize(
    "name",
    [pytest.param("v5e:2x2", marks=needs_libtpu), pytest.param("h100:4", marks=needs_cuda)],
)
def test_a_step_sorts_no_more_than_it_sends(name, form):
    side, leaves = 320, 1
    row = row_of(compiled(jrc.target(name), form, side, leaves))
    # Of 102 entries that are sent 29 at most go to each of four owners.
    assert max(row["sorted"], default=0) == (4 * 29 if form == "sharded" else 0)
    assert (row["all-gather"], row["all-reduce"]) == (1, 1)
    assert row.get("all-to-all", 0) == (form == "sharded")
    assert row["aliased"] >= 3 * 4 * side**2
    # u, v and the parameters of each leaf; what a sharded exchange returns, and its own sums.
    assert row["scatter"] == (3 if form == "exact" else 7)
