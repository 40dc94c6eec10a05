"""Recomputation without effect is said, with the way out; what has an effect is not blamed."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jrc
from jrc._jaxpr import inline_marked, live_equations
from jrc.remat._gradient.compiled_memory import memory_of
from jrc.remat._gradient.loss import loss_of
from jrc.remat._report.diagnostics import warnings_of

W = jnp.linspace(-0.5, 0.5, 4096).reshape(64, 64) * 0.2
X = jnp.linspace(-0.4, 0.6, 128 * 64).reshape(128, 64)
POLICIES = jax.checkpoint_policies


def block(w, x):
    return jnp.sin(jnp.sin(x @ w) @ w)


def deep(w, x, layers=4, wrap=lambda block: block, head=True):
    for i in range(layers):
        x = jrc.mark(wrap(block)(w, x), f"block_{i}")
    return jnp.sum(jnp.exp(jnp.cos(jnp.sin(x)))) if head else jnp.sum(x)


def warnings(fn, *args):
    """The report's warnings, without compiling anything."""
    loss = loss_of(fn, args, 0, False, "here")
    gradient = inline_marked(
        jax.make_jaxpr(loss.gradient)(loss.perturbed, loss.rest), lambda _: True
    )
    return warnings_of(loss.program.jaxpr, gradient, live_equations(gradient), loss.name)


def peak(fn):
    memory = memory_of(jax.jit(jax.value_and_grad(fn)).lower(W, X).compile())
    return memory.temporaries + memory.outputs


@pytest.mark.parametrize(
    "fn",
    [
        deep,
        jrc.recompute_segments(deep, ["block_0", "block_1", "block_2", "block_3"]),
        functools.partial(deep, wrap=jax.checkpoint),
        jrc.apply_rules(deep, jrc.RecomputePrimitives("sin")),
    ],
)
def test_what_frees_memory_is_not_blamed(fn):
    assert warnings(fn, W, X) == []


@pytest.mark.parametrize("way", ["checkpoint", "recompute"])
def test_one_region_around_all_frees_nothing(way):
    fn = jax.checkpoint(deep) if way == "checkpoint" else functools.partial(jrc.recompute, deep)
    (text,) = warnings(fn, W, X)
    assert text.startswith("the region in `") and "`) frees" not in text
    assert "frees nothing: it is run again in one piece" in text
    assert "Cut it into several regions, as jrc.recompute_segments(fn, ['block_0', ...])" in text
    # 3 % of what XLA lays out otherwise; regions of their own need less than half of it.
    assert peak(fn) > 0.95 * peak(deep)
    lean = functools.partial(deep, wrap=jax.checkpoint)
    assert peak(lean) < 0.8 * peak(deep)


def test_a_region_that_the_backward_pass_begins_with():
    """Kept instead, as the warning says, it needs no byte more and runs less."""
    names = ["block_0", "block_1", "block_2", "block_3"]
    fn = functools.partial(deep, head=False)
    lean = jrc.recompute_segments(fn, names)
    (text,) = warnings(lean, W, X)
    assert text.startswith("region 3 of 4 (from 0) in `deep` frees nothing of the peak: ")
    assert "no_recompute_segments=... of jrc.recompute_segments" in text
    kept = jrc.recompute_segments(fn, names, no_recompute_segments=[3])
    assert warnings(kept, W, X) == [] and peak(kept) <= peak(lean)
    reports = [jrc.explain(each, W, X) for each in (lean, kept)]
    assert reports[0].warnings == (text,) and reports[1].rerun_flops < reports[0].rerun_flops


NEEDLESS = {
    "all is kept": jax.checkpoint(block, policy=POLICIES.everything_saveable),
    "a product": jax.checkpoint(lambda w, x: x @ w),
    "a sum": lambda w, x: jnp.sin(jax.checkpoint(lambda x: x + 1.0)(x @ w)),
    "in a loop": lambda w, x: jax.lax.scan(
        lambda c, _: (jax.checkpoint(lambda c: c @ w)(c), None), x, None, length=3
    )[0],
}


@pytest.mark.parametrize("case", NEEDLESS)
def test_regions_of_which_the_derivative_needs_nothing(case):
    (text,) = warnings(lambda w, x: jnp.sum(jnp.cos(NEEDLESS[case](w, x @ w))), W, X)
    assert text.startswith("the region at test_explain_effect.py:") and text.endswith(
        "frees nothing: the derivative needs nothing that is made inside. Leave out the wrap."
    )


def test_a_region_around_regions():
    """Around two it frees what goes from one to the other, around one it frees nothing."""
    fn = functools.partial(deep, wrap=jax.checkpoint)
    assert warnings(jrc.recompute_segments(fn, ["block_1"]), W, X) == []
    (text,) = warnings(jrc.recompute_segments(fn, ["block_0"]), W, X)
    assert "in `deep` frees nothing: the derivative needs nothing" in text


def test_a_region_in_a_loop_is_known_by_what_it_makes():
    def loss(wrap, w, x):
        step = lambda c, _: (wrap(w, c), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, None, length=4)[0])

    assert warnings(functools.partial(loss, jax.checkpoint(block)), W, X) == []


def test_a_name_that_a_policy_keeps_and_nothing_carries():
    def loss(names_in, w, x):
        def inner(w, x):
            return jnp.sin(names_in(jnp.sin(x @ w)) @ w)

        run = jax.checkpoint(inner, policy=POLICIES.save_only_these_names("h"))
        for _ in range(2):
            x = run(w, x)
        return jnp.sum(jnp.exp(jnp.cos(jnp.sin(x))))

    line = loss.__code__.co_firstlineno + 6
    assert warnings(functools.partial(loss, lambda x: checkpoint_name(x, "h")), W, X) == []
    (text,) = warnings(functools.partial(loss, lambda x: checkpoint_name(x, "g")), W, X)
    assert text == (
        f"the policy of the jax.checkpoint region at test_explain_effect.py:{line} keeps 'h', a "
        "name that nothing inside carries: it has 'g'. Correct the policy."
    )
    (text,) = warnings(functools.partial(loss, lambda x: jrc.mark(x, "h")), W, X)
    assert "jax.checkpoint does not see jrc.mark: name it with jax.ad_checkpoint" in text
    assert "or use jrc.Save('h') with jrc.recompute_segments" in text
    (text,) = warnings(functools.partial(loss, lambda x: x), W, X)
    assert "it has no names. Correct the policy." in text


def keeps_sines(prim, *_, **__):
    return prim.name == "sin"


@pytest.mark.parametrize(
    "policy",
    [keeps_sines, POLICIES.save_anything_except_these_names("h"), POLICIES.dots_saveable, None],
)
def test_a_policy_that_is_not_asked(policy):
    """With `jax_remat3` sines run again although a policy keeps them."""
    fn = functools.partial(deep, wrap=lambda block: jax.checkpoint(block, policy=policy))
    found = [text for text in warnings(fn, W, X) if text.startswith("the policy")]
    is_custom = policy is keeps_sines or getattr(policy, "__name__", "") == "<lambda>"
    if jax.config.jax_remat3 and is_custom:
        (text,) = found
        assert "keeps 'sin'" in text or "'sin'" in text
        assert "jax_remat3 asks a policy of named values and matrix products only" in text
        assert "keep=jrc.Save('name')" in text
    else:
        assert found == []


def test_a_rule_or_a_boundary_that_nothing_matches():
    rules = jrc.RecomputePrimitives("sin", "tahn")
    (text,) = jrc.explain(jrc.apply_rules(deep, rules), W, X).warnings
    assert text.startswith(
        "jrc.apply_rules: keep=jrc.RecomputePrimitives(...) names 'tahn', and `deep` has no such "
        "operator"
    )
    lean = jrc.recompute_segments(deep, ["block_1", "nothing"], rule="fluid")
    (text,) = jrc.explain(lean, W, X).warnings
    assert text.startswith("jrc.recompute_segments: boundary 'nothing' cuts nothing: ")
    # Said again each time that somebody asks.
    assert jrc.explain(lean, W, X).warnings == (text,)
