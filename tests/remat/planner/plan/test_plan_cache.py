"""Plans in a folder, programs that are compiled once, and the bound on the solver's work."""

import dataclasses
import functools
import importlib.metadata
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from jrc.remat._planner import make_plan
from jrc.remat._planner.plan import plan_cache
from jrc.remat._planner.search import peaks
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver import constructs, solver
from tests.remat.planner.problems import problem_of


def loss(weights, x, times=4):
    for _ in range(times):
        x = jnp.tanh(jnp.sin(x @ weights) @ weights)
    return jnp.sum(x**2)


ARGS = jnp.asarray(np.eye(16, dtype=np.float32) / 2), jnp.ones((64, 16))


@pytest.fixture
def searches(monkeypatch):
    """The budgets that were searched for."""
    found = []
    plan_for = make_plan.plan_for

    def counted(known, limit, *rest):
        found.append(limit)
        return plan_for(known, limit, *rest)

    monkeypatch.setattr(make_plan, "plan_for", counted)
    return found


def test_a_plan_is_found_again(tmp_path, searches):
    first = jrc.plan(loss, *ARGS, budget=0.5, cache=tmp_path / "plans")
    # Another function with the same program, and arrays of other values.
    again = jrc.plan(
        lambda w, x: loss(w, x), 2 * ARGS[0], ARGS[1], budget=0.5, cache=str(tmp_path / "plans")
    )
    assert again == first and len(searches) == 1
    assert jax.jit(jax.grad(again.apply(loss)))(*ARGS).shape == (16, 16)


@pytest.mark.slow
def test_what_a_plan_follows_from_is_compared(tmp_path, searches):
    given = dict(budget=0.5, verify=False, cache=tmp_path)
    jrc.plan(loss, *ARGS, **given)
    changes = [
        dict(budget=0.25),
        dict(verify=True),
        dict(verify=True, compilations=4),
        dict(args=(ARGS[0], jnp.ones((32, 16)))),
        dict(args=(ARGS[0].astype(jnp.bfloat16), ARGS[1])),
        dict(args=jax.device_put(ARGS, jax.devices()[1])),
    ]
    for count, change in enumerate(changes, 2):
        jrc.plan(loss, *change.pop("args", ARGS), **given | change)
        assert len(searches) == len(list(tmp_path.glob("*.json"))) == count


def test_a_plan_of_another_compiler_is_not_taken(tmp_path, searches, monkeypatch):
    versions = importlib.metadata.distributions
    made = types.SimpleNamespace(name="jax_cuda13_pjrt", version="0.1")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [*versions(), made])
    for made.version in ("0.1", "0.2", "0.2"):
        jrc.plan(loss, *ARGS, budget=0.5, verify=False, cache=tmp_path)
    assert len(searches) == 2


def under(policy):
    layer = jax.checkpoint(lambda w, x: jnp.tanh(jnp.sin(x @ w) @ w), policy=policy)
    return lambda w, x: jnp.sum(layer(w, layer(w, x)))


def with_rule(saved):
    @jax.custom_vjp
    def layer(w, x):
        return jnp.sin(x @ w)

    def forward(w, x):
        return layer(w, x), (w, x, [jnp.cos(x @ w)] * saved)

    def backward(kept, g):
        w, x, more = kept
        g = g * (more[0] if more else jnp.cos(x @ w))
        return x.T @ g, g @ w.T

    layer.defvjp(forward, backward)
    return lambda w, x: jnp.sum(layer(w, layer(w, x)))


POLICIES = jax.checkpoint_policies


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    "fns",
    [
        (under(POLICIES.nothing_saveable), under(POLICIES.dots_saveable)),
        (under(POLICIES.save_only_these_names("a")), under(POLICIES.everything_saveable)),
        (with_rule(0), with_rule(1)),
        (lambda w, x: loss(w, x * 1.0), lambda w, x: loss(w, x * 3.0)),
    ],
    ids=["policies", "other policies", "custom rules", "constants"],
)
def test_what_the_gradient_does_is_compared(tmp_path, searches, fns):
    for fn in fns:
        options = dict(budget=0.5, verify=False, respect_checkpoints=True)
        jrc.plan(fn, *ARGS, cache=tmp_path, **options)
    assert len(searches) == 2


def test_a_damaged_plan_is_made_again(tmp_path, searches, caplog):
    first = jrc.plan(loss, *ARGS, budget=0.5, verify=False, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:100])
    with caplog.at_level(logging.WARNING, "jrc"):
        assert jrc.plan(loss, *ARGS, budget=0.5, verify=False, cache=tmp_path) == first
    assert "is no plan and is replaced" in caplog.text
    assert jrc.Plan.from_json(path.read_text()) == first and len(searches) == 2


def test_a_folder_is_a_path():
    with pytest.raises(TypeError, match="cache must be the path of a folder, got bool"):
        jrc.plan(loss, *ARGS, budget=0.5, cache=True)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_is_no_folder(tmp_path, below):
    file = tmp_path / "taken"
    file.write_text("")
    with pytest.raises(ValueError, match=r"cache must be a folder that can be written, got '.*tak"):
        jrc.plan(loss, *ARGS, budget=0.5, cache=file / below)


def test_a_plan_that_cannot_be_stored_is_returned(tmp_path, monkeypatch, caplog):
    def full(*_args, **_options):
        raise OSError("No space left on device")

    monkeypatch.setattr(plan_cache.tempfile, "NamedTemporaryFile", full)
    with caplog.at_level(logging.WARNING, "jrc"):
        plan = jrc.plan(loss, *ARGS, budget=0.5, verify=False, cache=tmp_path)
    assert isinstance(plan, jrc.Plan) and "was not stored (No space left" in caplog.text


def test_large_constants_have_no_part_in_the_text(monkeypatch):
    rows = np.random.default_rng(0).random((300, 16), np.float32)
    fn = lambda w: jnp.sum(jnp.tanh(rows @ w))  # noqa: E731
    problem = problem_of(fn, (jnp.ones((16, 16)),))
    hashed, sha256 = [], peaks.hashlib.sha256
    monkeypatch.setattr(
        peaks.hashlib, "sha256", lambda *text: hashed.extend(map(len, text)) or sha256(*text)
    )
    peaks.Peaks(problem).compiled(problem.baseline)
    assert 0 < max(hashed) < rows.nbytes


def test_equal_programs_are_compiled_once(monkeypatch):
    problem = problem_of(loss, ARGS)
    compiled = []
    cost = peaks.compiled_cost
    monkeypatch.setattr(peaks, "compiled_cost", lambda *given: compiled.append(0) or cost(*given))
    known = peaks.Peaks(problem)
    lean, twin = (
        dataclasses.replace(problem.front[0], name=name)
        for name in ("it", "the same under another name")
    )
    assert known.compiled(lean) == known.compiled(twin)
    assert known.programs([lean, twin]) == len(compiled) == 1


@pytest.mark.slow
def test_beyond_the_bound_on_work_manual_plans_remain(monkeypatch, caplog):
    few = dataclasses.replace(SETTINGS, label_steps=20)
    monkeypatch.setattr(constructs, "solve", functools.partial(solver.solve, settings=few))
    with caplog.at_level(logging.WARNING, "jrc"):
        plan = jrc.plan(loss, *ARGS, budget=0.0)
    assert "takes the planner too much work" in caplog.text
    monkeypatch.undo()
    nothing = jrc.plan(loss, *ARGS, budget=1.0)
    assert plan.verified.peak_bytes < nothing.verified.peak_bytes
    assert {each.name for each in plan.candidates} >= {"everything recomputed", "products saved"}
