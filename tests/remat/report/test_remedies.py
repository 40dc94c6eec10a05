"""What is offered to make a peak smaller: only what is true, and only what helps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jrc
from jrc.remat._gradient.compiled_memory import memory_of
from jrc.remat._report import tried_remedies
from jrc.remat._report.remedies import LEAST_SAVING

X = jnp.ones((512, 512))
SMALL = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def tried(fn, *args, **options):
    return jrc.explain(fn, *args, **{"argnums": None, "try_remedies": True} | options)


def kinds(report):
    return [each.kind for each in report.remedies]


def two(p, q):
    return p + 1, q * 2


def test_a_plan_that_changes_nothing_is_none(monkeypatch):
    """A plan of a function as it is without chunks is the function, whatever its peak."""
    fn = lambda x: jnp.sort(x, axis=-1)[:, ::2].sum(1)  # noqa: E731
    assert "plan" in kinds(tried(fn, X))
    plan = jrc.plan(fn, X, argnums=None, budget="1GiB")
    few = dataclasses.replace(plan, verified=dataclasses.replace(plan.verified, peak_bytes=1))
    monkeypatch.setattr(tried_remedies, "plan_for_each", lambda *_, budgets, **__: [few] * 3)
    assert few.chunks == () and not {"plan", "chunks"} & set(kinds(tried(fn, X)))


def test_donation_keeps_the_shardings_of_jit():
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,), devices=jax.devices()[:4])
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("d",), ()))
    options = {"in_shardings": (split, whole, split), "out_shardings": (split, whole)}
    step = lambda p, q, unused: two(p, q)  # noqa: E731
    found = tried(jax.jit(step, **options), X, SMALL, X)
    both = jax.jit(step, donate_argnums=(0, 1), **options).lower(X, SMALL, X).compile()
    (donated,) = (each for each in found.remedies if each.kind == "donate")
    assert donated.is_compiled and donated.peak_bytes == memory_of(both).peak
    assert found.donatable == 512 * 512 + 16 * 16 * 4 and found.donatable_argnums == (0, 1)


def wide_step(p, x):
    h = jnp.sort(x, axis=-1)
    return p + jnp.sum(jnp.sort(h @ h.T, axis=0) * h), h


def test_donation_is_always_named_and_must_save_something_compiled():
    plain = jrc.explain(jax.jit(wide_step), SMALL, X, argnums=None)
    (donated,) = (each for each in plain.remedies if each.kind == "donate" and not each.is_compiled)
    assert 0 < donated.bytes and "donate_argnums=(0, 1)" in donated.text
    few = jrc.explain(jax.jit(lambda p, x: wide_step(p, x)[0]), SMALL, X, argnums=None)
    assert 0 < few.donatable < LEAST_SAVING * few.memory.peak and "donate" in kinds(few)
    assert "donate" not in kinds(tried(jax.jit(lambda p, x: wide_step(p, x)[0]), SMALL, X))
    assert jrc.explain(lambda n: n + 1, jnp.float32(1), argnums=None).donatable == 0  # a scalar


@pytest.mark.parametrize("case", ["empty", "nothing"])
def test_no_plan_is_tried_without_temporaries(case, caplog):
    fn, x = {
        "empty": (lambda x: x * 2, jnp.zeros((0, 4))),
        "nothing": (lambda x: None, jnp.ones(3)),
    }[case]
    assert tried(fn, x).memory.temporaries == 0 and not caplog.records


REFUTED = {
    "transposed": lambda a: a.T,
    "sorted": lambda a: jnp.sort(a, 0),
    "product": lambda a: a @ a.T,
}


@pytest.mark.parametrize("case", REFUTED)
def test_what_was_tried_in_vain_is_not_named(case):
    fn = REFUTED[case]
    assert "donate" in kinds(jrc.explain(fn, X, argnums=None))
    found = tried(fn, X)
    assert not {"donate", "chunks"} & set(kinds(found))
    assert jrc.Report.from_json(found.to_json()).remedies == found.remedies


def test_chunks_are_not_named_after_plans_found_none():
    fn = lambda a: jnp.linalg.qr(a)[0]  # noqa: E731
    assert "chunks" in kinds(jrc.explain(fn, X, argnums=None))
    assert not {"chunks", "plan"} & set(kinds(tried(fn, X)))


def fused(x):
    return jnp.sum(jnp.exp(x) * jnp.cos(x))


def wide(p, x):
    return jnp.sum(wide_step(p, x)[0] ** 2)


@pytest.mark.parametrize("argnums", [0, None])
@pytest.mark.parametrize("fn, args", [(fused, (X,)), (wide, (SMALL, X))])
def test_no_remedy_is_about_more_than_there_is(fn, args, argnums):
    found = jrc.explain(fn, *args, argnums=argnums)
    many = dataclasses.replace(found.saved[0], bytes=2**40, times=1, primitive="sort")
    found = dataclasses.replace(found, saved=(*found.saved, many), donatable=2**40)
    for each in found.remedies:
        assert 0 <= each.bytes <= found.memory.peak and (each.peak_bytes or 0) >= 0
        if each.kind in ("chunks", "cast", "plan"):
            assert each.bytes <= found.memory.temporaries


def test_a_plan_of_a_loss_leaves_out_some_of_the_temporaries():
    found = jrc.explain(jax.jit(wide_step, donate_argnums=0), SMALL, X, argnums=None)
    (loss,) = (each for each in found.remedies if each.kind == "loss")
    assert loss.peak_bytes is None and loss.bytes == found.memory.temporaries
    assert "a plan of its loss leaves out some" in str(loss) and "of a peak of" not in str(loss)


@pytest.mark.slow
def test_a_budget_that_is_refused_is_not_offered(monkeypatch):
    def loss(w, x):
        for _ in range(3):
            x = jnp.sin(jnp.sin(x @ w))
        return jnp.sum(x)

    w, x = (jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (64, 128))
    plan = jrc.plan(loss, w, x, budget=0.0)
    error = jrc.BudgetError("too small", plan.verified.peak_bytes, plan)
    monkeypatch.setattr(tried_remedies, "plan_for_each", lambda *_, budgets, **__: [error] * 3)
    found = tried(loss, w, x, argnums=0)
    assert plan.verified.peak_bytes < (1 - LEAST_SAVING) * found.memory.peak
    assert found.tried == () and "plan" in kinds(found)


class Low:
    """An object that is lowered by its own method, and cannot be traced."""

    def __init__(self, fn):
        self.compiled = jax.jit(fn)

    def lower(self, *args):
        return self.compiled.lower(*args)

    def __call__(self, *args):
        return np.asarray(self.compiled(*args))


def test_a_trial_that_raises_loses_no_report(caplog):
    fn = Low(lambda a: jnp.sort(a @ a, 0) @ jnp.sort(a.T, 1))
    found = tried(fn, X)
    assert found == jrc.explain(fn, X, argnums=None) and "donate" in kinds(found)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("jrc.explain: donated arguments could not be tried: TracerArrayConv")
    assert second.startswith("jrc.explain: plans could not be tried: TypeError: jrc.plan: `Low`")


def test_one_array_is_donated_once():
    found = tried(two, X, X)
    assert found.donatable == X.nbytes and found.donatable_argnums == (0,)
    assert jrc.explain(two, X, X + 1, argnums=None).donatable_argnums == (0, 1)


def test_other_functions_that_are_lowered_by_themselves():
    found = jrc.explain(nnx.jit(lambda x: x + 1), X, argnums=None)
    assert found.flops == X.size and found.donatable == X.nbytes

    class Traced:
        trace = 3

        def __call__(self, x):
            return x + 1

    assert jrc.explain(Traced(), X, argnums=None).flops == X.size


def test_a_plan_is_named_where_the_loss_itself_recomputes_all():
    """Few bytes are saved, and all temporaries are those of the backward pass."""

    def loss(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    args = jnp.ones((32, 32)) / 32, jnp.ones((4096, 32))
    report = jrc.explain(jax.checkpoint(loss), *args)
    assert report.saved_bytes < 0.2 * report.memory.temporaries
    (named,) = (each for each in report.remedies if each.kind == "plan")
    assert named.bytes == report.memory.temporaries and not named.is_compiled
    plan = jrc.plan(jax.checkpoint(loss), *args, budget="60%")
    assert plan.verified.peak_bytes <= 0.6 * report.memory.peak
