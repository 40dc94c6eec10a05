"""One value says which mesh axis does what, and refuses what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrc._layout import Layout, check_whole


def mesh(*sizes, names=("data", "chip", "fsdp")):
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)])


def shape(*sizes, on=None, spec=None):
    sharding = None if on is None else NamedSharding(on, spec or P())
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)


def test_each_axis_has_one_part():
    layout = Layout.of(mesh(2, 2, 2), ("chip", "data"))
    assert (layout.replicas, layout.means, layout.inside) == ("data", "chip", ("fsdp",))
    assert (layout.names, layout.rows, layout.parts) == (("data", "chip"), 2, 4)
    assert Layout.of(None, "x").mesh.shape == {"x": len(jax.devices())}
    assert Layout.of(mesh(4, 1), "data").splits_replicas == ()


def test_arrays_lie_as_their_parameters():
    on = mesh(2, 1, 4)
    params = {"w": shape(8, 6, on=on, spec=P("fsdp")), "b": shape(6)}
    layout = Layout.of(on, "data", params)
    assert layout.params == {"w": P("fsdp"), "b": P()}
    state = jax.eval_shape(optax.adam(0.1).init, params)
    specs = layout.like_params(state, params)
    assert specs[0].mu == layout.params and specs[0].count == P()
    assert layout.in_rows(layout.params) == {"w": P("data", "fsdp"), "b": P("data")}
    assert layout.shard(params, layout.params)["w"].shape == (2, 6)
    assert layout.batch((shape(8), shape(8, 4, on=on, spec=P(None, "fsdp")))) == (
        P("data"),
        P("data", "fsdp"),
    )
    assert layout.shardings(P("data")) == NamedSharding(on, P("data"))


def test_bytes_to_reduce_are_those_of_a_ring():
    layout = Layout.of(mesh(4, 1, 2), "data")
    grads = [shape(8, 6), shape(8, 6)]
    # An all-reduce of half a leaf, and a reduce-scatter of an eighth.
    found = layout.bytes_to_reduce(grads, [P("fsdp"), P(("data", "fsdp"))])
    assert found == 2 * 3 / 4 * 96 + 3 * 24


def test_a_function_of_shards_gets_those_of_a_device():
    on = mesh(1, 1, 4)
    layout = Layout.of(on, "data")
    run = layout.on_devices(lambda x: x.sum()[None], P("fsdp"), P("fsdp"))
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
        shards = jax.jit(run)(jax.device_put(jnp.arange(8.0), NamedSharding(on, P("fsdp"))))
    assert shards.tolist() == [1.0, 5.0, 9.0, 13.0]
    fn = jnp.sum
    assert layout.of_single_devices().on_devices(fn, P(), P()) is fn


@pytest.mark.parametrize(
    ("on", "axis", "words"),
    [
        (lambda: "mesh", "data", "mesh must be a jax.sharding.Mesh or None, got str"),
        (lambda: mesh(2), "model", "axis_name must be an axis of the mesh, got 'model'. The axes"),
        (lambda: mesh(2), ("a",), "axis_name must be the name of one axis or a pair"),
        (lambda: None, ("a", "b"), "mesh must be given with a pair of axes"),
    ],
)
def test_what_does_not_fit_is_refused(on, axis, words):
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        Layout.of(on(), axis)


def test_arrays_of_another_mesh_are_refused():
    layout = Layout.of(mesh(4), "data")
    other = shape(8, on=mesh(2), spec=P("data"))
    with pytest.raises(
        ValueError, match="over the mesh of the run, Mesh.data: 4., got one over .*2"
    ):
        layout.with_params({"w": other})
    with pytest.raises(ValueError, match="params must be whole on every replica here, got 'w' spl"):
        check_whole({"w": P("data")}, layout.names, "params", "here", "Split it over {over}.")
