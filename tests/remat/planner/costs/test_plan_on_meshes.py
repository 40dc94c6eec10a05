"""Plans for programs that XLA splits over devices: predicted peaks are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc._targets import accelerator
from jrc.models import gpt
from jrc.remat._gradient.compiled_memory import memory_needed
from jrc.remat._planner.costs.sharding import most_parts
from jrc.remat._planner.search import peaks as peaks_module
from jrc.remat._planner.search.compiled_cost import compiled_cost
from jrc.remat._planner.search.peaks import Peaks
from jrc.remat._planner.search.search import Search
from tests.remat.planner.problems import problem_of, program_of

CONFIG = gpt.Config(layers=4, heads=4, width=128, length=128)
EXPERTS, WIDTH, LAYERS = 8, 64, 6


def gpt_loss(params, batch):
    return gpt.loss(params, batch, None, config=CONFIG)


def moe_loss(params, batch):
    """Blocks of experts; every example is weighted over all of them."""
    x = batch
    for layer in params:
        gates = jax.nn.softmax(x @ layer["gate"])
        hidden = jax.nn.gelu(jnp.einsum("btd,edh->bteh", x, layer["up"]))
        x = x + jnp.einsum("bteh,ehd,bte->btd", hidden, layer["down"], gates)
    return jnp.mean(x**2)


def moe_params():
    draw = np.random.default_rng(0)
    shapes = {
        "gate": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, 2 * WIDTH),
        "down": (EXPERTS, 2 * WIDTH, WIDTH),
    }
    return [
        {k: 0.1 * draw.normal(size=s).astype(np.float32) for k, s in shapes.items()}
        for _ in range(LAYERS)
    ]


def split(params, mesh, model):
    """Experts over "model", or the first axis where there is one; the rest FSDP and tensors."""
    fsdp = "fsdp"

    def spec(path, x):
        name = jax.tree_util.keystr(path)
        if x.ndim == 3:
            return P(model or fsdp, fsdp if model else None)
        if x.ndim < 2 or "gate" in name:
            return P()
        return P(model, fsdp) if "out" in name or "down" in name else P(fsdp, model)

    return jax.tree.map_with_path(
        lambda path, x: jax.device_put(x, NamedSharding(mesh, spec(path, x))), params
    )


def problem_on(kind, sizes):
    names = {1: ("fsdp",), 2: ("fsdp", "model"), 3: ("replica", "fsdp", "model")}[len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    rows = names[:-1] if len(names) > 1 else names
    params = gpt.init(jax.random.key(0), CONFIG) if kind == "gpt" else moe_params()
    data = np.zeros((16, 129), np.int32) if kind == "gpt" else np.ones((16, 32, WIDTH), np.float32)
    args = (
        split(params, mesh, "model" if len(sizes) > 1 else None),
        jax.device_put(data, NamedSharding(mesh, P(rows))),
    )
    return gpt_loss if kind == "gpt" else moe_loss, args


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2)])
@pytest.mark.parametrize(
    ("kind", "within"), [("gpt", (0.2, 0.2, 0.35)), ("moe", (0.35, 0.35, 0.55))]
)
def test_predicted_peaks_are_near_the_compiled_ones(kind, within, sizes):
    # Of the GPT on 2 x 2 x 2 what saves nearly all is expected to need 0.31 more than it does.
    # Of a mixture of experts a plan that saves more may need less: docs/limits.md says why. What
    # saves nearly all is expected to need 0.54 more than it does on 8 devices, 0.27 on 4 x 2.
    fn, args = problem_on(kind, sizes)
    problem = problem_of(fn, args)
    peaks = Peaks(problem)
    search = Search(problem.options, peaks, compilations=5)
    row = (*problem.front, problem.baseline)
    for at in (0, len(row) // 2, len(row) - 1):
        search.compile(row[at])
    places = len(row) // 3, 2 * len(row) // 3, 5 * len(row) // 6
    for at, most in zip(places, within, strict=True):
        expected, compiled = search.expected(row[at]), peaks.compiled(row[at]).peak
        assert abs(expected / compiled - 1) < most, (at, expected, compiled)


@pytest.mark.exhaustive
def test_a_plan_that_is_not_verified_predicts_one_device():
    fn, args = problem_on("moe", (4, 2))
    guess = jrc.plan(fn, *args, budget=1.0, verify=False)
    lowered = jax.jit(jax.value_and_grad(fn)).lower(*args)
    peak, compiled = guess.predicted.peak_bytes, memory_needed(lowered).peak
    assert abs(peak / compiled - 1) < 0.1
    assert guess.verified is None and guess.reruns is False and guess.compilations == 0


@pytest.fixture
def compilations(monkeypatch):
    """The candidates that are compiled, and CPU devices in the place of a target's."""
    found = []

    def compiled(*args):
        found.append(args)
        return compiled_cost(*args)

    monkeypatch.setattr(peaks_module, "compiled_cost", compiled)
    monkeypatch.setattr(
        accelerator, "compile_only_devices", lambda named: tuple(jax.devices()[-4:])
    )
    return found


def chain(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def split_rows(devices, batch=512):
    mesh = Mesh(np.array(devices), ("data",))
    rows = NamedSharding(mesh, P("data"))
    shape = jax.ShapeDtypeStruct
    return [shape((32, 32), "float32")] * 8, shape((batch, 32), "float32", sharding=rows)


def test_a_target_compiles_three_programs_for_sharded_arguments_too(compilations, caplog):
    target = jrc.target("v5p:2x2x1")
    args = split_rows(target.devices)
    with caplog.at_level("INFO", "jrc"):
        plan = jrc.plan(chain, *args, budget="200KiB", target=target)
    assert plan.reruns and plan.verified.peak_bytes <= 200 * 1024
    assert plan.compilations == len(compilations) <= 3
    assert sum(": compiling " in text for text in caplog.messages) == plan.compilations
    # What was not compiled is predicted for one device, in the light of what was.
    whole = 8 * 512 * 32 * 4
    assert all(each.predicted.peak_bytes < whole for each in plan.candidates)


def test_nothing_recomputed_is_compiled_first_where_its_part_fits(compilations):
    target = jrc.target("v5p:2x2x1")
    plan = jrc.plan(chain, *split_rows(target.devices), budget="512KiB", target=target)
    assert not plan.reruns and plan.compilations == len(compilations) == 1


def test_without_verification_nothing_is_compiled(compilations):
    target = jrc.target("v5p:2x2x1")
    args = split_rows(target.devices)
    plan = jrc.plan(chain, *args, budget="200KiB", target=target, verify=False)
    assert plan.verified is None and plan.compilations == len(compilations) == 0
    assert plan.reruns and plan.predicted.peak_bytes <= 200 * 1024


def test_as_many_parts_as_the_argument_that_is_split_most():
    ws, x = split_rows(jax.devices()[:4])
    assert most_parts([*ws, x, jax.random.key(0), np.zeros((0, 2))]) == 4 and most_parts(ws) == 1


def test_a_constraint_inside_of_a_program_says_into_how_many_parts_too():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    split = {"rows": P("data"), "both": P("data", "model"), "none": P()}

    def loss(x, spec):
        sharding = NamedSharding(mesh, spec)
        return jnp.sum(jax.lax.with_sharding_constraint(jnp.sin(x), sharding) ** 2)

    x = jax.ShapeDtypeStruct((64, 64), "float32")
    for name, parts in (("rows", 2), ("both", 4), ("none", 1)):
        problem = problem_of(functools.partial(loss, spec=split[name]), (x,))
        assert most_parts([x], program_of(problem)) == problem.parts == parts
        assert problem.parts == parts
        predicted = Peaks(problem).predicted(problem.baseline)
        assert predicted == problem.own + problem.baseline.peak // parts


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_random_numbers_on_explicit_axes(budget):
    """JAX draws them on automatic axes inside, where nothing can be saved or named."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    split = P("data", None)

    def loss(w, x, key):
        hidden = jnp.tanh(x @ w)
        keeps = jax.random.bernoulli(key, 0.5, hidden.shape, out_sharding=split)
        hidden = jnp.where(keeps, hidden, 0)
        noise = jax.random.normal(key, hidden.shape, out_sharding=split)
        return jnp.mean(jnp.sin((hidden + noise) @ w.T) ** 2)

    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((32, 256)) / 64, P())
        x = jax.device_put(jnp.ones((512, 32)), split)
        key = jax.random.key(0)
        plan = jrc.plan(loss, w, x, key, budget=budget)
        found = jax.jit(jax.value_and_grad(plan.apply(loss)))(w, x, key)
        wanted = jax.jit(jax.value_and_grad(loss))(w, x, key)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
