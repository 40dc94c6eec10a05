"""Lookups in arguments, as of embeddings: on a TPU plans run few of them again."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from jrc._jaxpr import primitive_name
from tests.remat.planner.problems import gradient_of, problem_of, program_of

TABLES = {"words": (20_000, 64), "places": (80, 64)}


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def layers(params, x):
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w) @ w.T
    return jnp.mean(x**2)


def plain(params, tokens):
    return layers(params, params["words"][tokens])


def shifted(params, tokens):
    """The indices are computed, and scaled rows have those of positions added."""
    x = params["words"][tokens[:, 1:]] * 8.0
    return layers(params, x + params["places"][jnp.arange(tokens.shape[1] - 1)][None])


def read_again(params, tokens):
    """Each layer reads what was looked up."""
    first = x = params["words"][tokens]
    for w in params["layers"]:
        x = x + jnp.tanh((x + first) @ w) @ w.T
    return jnp.mean(x**2)


def frozen(params, tokens, words):
    """The table has no gradient; what is looked up is scaled by what has one."""
    x = words[tokens]
    return layers(params, x * params["layers"][0][:, 0][None, None])


def stopped(params, tokens):
    """The same of an argument that is differentiated, and whose gradient is stopped."""
    return frozen(params, tokens, jax.lax.stop_gradient(params["words"]))


def problem_on(platform, loss, minimize="time", rows=TABLES["words"][0]):
    params = {name: array(*shape) for name, shape in TABLES.items()}
    params |= {"words": array(rows, 64), "layers": [array(64, 256)] * 6}
    target = {"gpu": "h100", "tpu": "v5p"}[platform]
    tokens = array(64, 65, dtype=jnp.int32)
    args = (params, tokens, params.pop("words")) if loss is frozen else (params, tokens)
    return problem_of(loss, args, platform=platform, target=target, minimize=minimize)


def lookups_of(problem):
    """The positions of lookups in arguments."""
    program = program_of(problem)
    names = [primitive_name(program.eqns[p]) for p in program.steps]
    return {k for k, name in enumerate(names) if name == "gather"}


def recomputed(option):
    """The positions that regions run again."""
    return {p for region in option.stages.regions for p in region.recomputed}


def holds_tables(problem, option):
    """Whether an array as large as a table is behind a barrier of the gradient."""
    args = problem.function.traced.program.jaxpr.invars
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in args]
    fn = jax.extend.core.jaxpr_as_fun(gradient_of(problem, option))
    lines = jax.jit(fn).lower(*shapes).as_text().splitlines()
    barriers = [each for each in lines if "optimization_barrier" in each]
    tables = ["x".join(map(str, shape)) for shape in TABLES.values()]
    return any(f"tensor<{table}x" in each for each in barriers for table in tables)


@pytest.mark.parametrize("loss", [plain, shifted, read_again, frozen, stopped])
def test_on_a_tpu_few_plans_hold_a_table_for_the_backward_pass(loss):
    """A lookup that is repeated has its table behind a barrier, which counts as seconds there."""
    repeating = {}
    for platform in ("gpu", "tpu"):
        problem = problem_on(platform, loss)
        lookups = lookups_of(problem)
        plans = sorted(problem.front, key=lambda each: each.peak)
        repeats = [bool(lookups & recomputed(each)) for each in plans]
        assert any(repeats) and not all(repeats)
        for each, is_repeated in zip(plans, repeats, strict=True):
            assert holds_tables(problem, each) == is_repeated
        repeating[platform] = sum(repeats) / len(repeats)
    assert repeating["tpu"] < repeating["gpu"]


def test_what_is_looked_up_is_recomputed_where_that_costs_nothing():
    """By FLOPs a lookup is free: the leanest plan takes rows again, in a region with the table."""
    problem = problem_on("tpu", plain, minimize="flops")
    (lookup,) = lookups_of(problem)
    assert lookup in recomputed(problem.front[0])


def test_a_table_of_gigabytes_changes_neither_the_forward_cost_nor_more_than_what_a_chip_holds():
    """Shares of the cost of a forward pass say which options are alike."""
    found = [problem_on("tpu", plain, rows=rows) for rows in (20_000, 5_000_000, 50_000_000)]
    graphs = [graph for problem in found for graph in problem.graphs.values()]
    forward = [graph.cost for graph in graphs]
    held = [max(node.table_cost for node in graph.nodes) for graph in graphs]
    assert forward[0] == forward[1] == forward[2]
    assert 0 < held[0] < held[1] == held[2]
    assert len(found[0].manual) == len(found[2].manual)
