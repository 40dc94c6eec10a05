"""The benchmark of largest batches on targets: its models, its tables, what it compiles."""

import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from benchmarks._lib.report import opened
from benchmarks._models.model import drawn
from benchmarks.targets import _largest_tables, largest_batch
from benchmarks.targets._models import AXIS, FULL, MODELS, PLAIN
from jrc._targets import accelerator

RESULTS = pathlib.Path(largest_batch.__file__).parents[1] / "results" / "targets.json"
PARAMETERS = {
    "gpt2_124m": 163, "gpt2_1.5b": 1638, "llama_1b": 1236, "llama_8b": 8030, "vit_l": 304,
    "resnet50": 26,
}  # fmt: skip


def mesh_of(count):
    devices = np.asarray(jax.devices()[:count])
    return Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_parameters_of_its_kind(name):
    params = MODELS[name](False).shapes(1)[0]
    assert round(sum(x.size for x in jax.tree.leaves(params)) / 1e6) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["llama_8b", "gpt2_1.5b"])
def test_nearly_all_parameters_are_split(name):
    leaves = jax.tree.leaves(MODELS[name](False).args(4, mesh_of(4))[0])
    whole = sum(x.size for x in leaves if x.sharding.is_fully_replicated)
    assert whole < 0.001 * sum(x.size for x in leaves)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["vit_l", "gpt2_124m", "llama_8b", "resnet50"])
def test_ways_have_one_value_on_one_and_two_devices(name):
    model = MODELS[name](True)
    values = []
    for count, way in ((1, PLAIN), (1, FULL), (2, FULL)):
        mesh = mesh_of(count)
        args = model.args(4, mesh)
        with jax.set_mesh(mesh):
            given = jax.tree.map(
                lambda x, like: jax.device_put(x, like.sharding), drawn(args), args
            )
            found = jax.jit(lambda *args, way=way: model.loss(*args, way=way))(*given)
        values.append(float(jax.tree.leaves(found)[0]))
    np.testing.assert_allclose(values[1:], values[0], rtol=2e-2)


@pytest.mark.exhaustive  # .ci/run runs the toy size, too
def test_a_toy_run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        accelerator, "compile_only_devices", lambda named: tuple(jax.devices()[-1:])
    )
    out = str(tmp_path / "targets.json")
    options = ["--toy", "--targets", "h100", "--out", out, "--plot", str(tmp_path)]
    report = largest_batch.main(options)
    (row,) = report["rows"].values()
    assert 0 < row["ways"]["jrc.plan"]["batch"] and row["ways"]["jrc.plan"]["compilations"] > 0
    assert list(_largest_tables.beaten(report)) == []
    assert (tmp_path / "targets.png").exists()
    # What the file has is not measured again.
    assert largest_batch.main(options)["rows"] == report["rows"]


def test_the_results_print_as_a_table():
    report = opened(RESULTS, largest_batch.NAME, "rows")
    (table,) = _largest_tables.tables(report)
    assert len(table.rows) == len(report["rows"])
