"""The benchmark of whole steps on meshes: its Llama, and the same steps on CPU devices."""

import argparse
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jrc
from benchmarks._lib.report import opened
from benchmarks._models import llama
from benchmarks.targets import sharded_step
from tests.remat.planner.problems import problem_of

RESULTS = pathlib.Path(sharded_step.__file__).parents[1] / "results" / "sharded_step.json"


@pytest.mark.exhaustive
def test_a_llama_learns_to_repeat_a_token():
    sizes = sharded_step.TOY
    shapes = llama.shapes(sizes)
    assert jax.tree.structure(shapes) == jax.tree.structure(llama.specs(shapes, hybrid=True))
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(0.05 * draw.normal(size=x.shape), x.dtype), shapes)
    tokens = jnp.full((2, sizes.length + 1), 7)
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        value = jax.jit(jax.value_and_grad(functools.partial(llama.loss, sizes=sizes)))
        before, grads = value(params, tokens)
        after, _ = value(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), tokens)
    assert after < before < 1.2 * np.log(sizes.vocabulary)


def test_a_llama_has_the_parameters_of_its_kind():
    count = sum(x.size for x in jax.tree.leaves(llama.shapes(llama.Sizes())))
    assert round(count / 1e6) == 1236


@pytest.mark.exhaustive
def test_compression_sends_less_between_replicas():
    mesh = jax.make_mesh((2, 2, 2), sharded_step.AXES, axis_types=(AxisType.Auto,) * 3)
    place = sharded_step.Place(jrc.target("h100:4x2"), mesh)
    options = argparse.Namespace(toy=True, batch=2)
    rows = {
        way: sharded_step._row(place, way, options, "cpu")
        for way in (sharded_step.DENSE, sharded_step.DGC)
    }
    dense, sparse = (sharded_step._sent(row, "replica") for row in rows.values())
    assert 0 < sparse < dense
    (table,) = sharded_step.tables({"rows": {"here": rows}})
    assert len(table.rows) == 2


def test_the_results_print_as_a_table():
    report = opened(RESULTS, sharded_step.NAME, "rows")
    (table,) = sharded_step.tables(report)
    assert len(table.rows) == sum(map(len, report["rows"].values()))


def test_a_tied_table_does_not_join_what_stands_on_both_sides_of_the_layers():
    """The table in lower precision is read before and behind the loop."""
    sizes = dataclasses.replace(sharded_step.TOY, layers=4)
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    tokens = jax.ShapeDtypeStruct((8, sizes.length + 1), jnp.int32)
    loss = functools.partial(llama.loss, sizes=sizes)
    with jax.set_mesh(mesh):
        problem = problem_of(loss, (llama.shapes(sizes), tokens))
    assert len(problem.front) > 3
    assert problem.front[0].peak < 0.5 * problem.baseline.peak
