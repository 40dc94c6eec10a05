"""`jrc.explain` warns of recomputation without effect, and of nothing that has an effect."""

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
    loss = loss_of(fn, args, 0, False)
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
def test_no_warning_for_what_frees_memory(fn):
    assert warnings(fn, W, X) == []


@pytest.mark.parametrize("way", ["checkpoint", "recompute"])
def test_one_region_around_all_frees_nothing(way):
    fn = jax.checkpoint(deep) if way == "checkpoint" else functools.partial(jrc.recompute, deep)
    (text,) = warnings(fn, W, X)
    assert text.startswith("the region in `") and "`) frees" not in text
    assert "frees nothing: it is recomputed in one piece" in text
    assert "Cut it into several regions, as jrc.recompute_segments(fn, ['block_0', ...])" in text
    # 3 % of what XLA lays out otherwise; regions of their own need less than half of it.
    assert peak(fn) > 0.95 * peak(deep)
    recomputed = functools.partial(deep, wrap=jax.checkpoint)
    assert peak(recomputed) < 0.8 * peak(deep)


def test_a_region_that_the_backward_pass_begins_with():
    """Saving its values, as the warning proposes, needs no more bytes and fewer FLOPs."""
    names = ["block_0", "block_1", "block_2", "block_3"]
    fn = functools.partial(deep, head=False)
    recomputed = jrc.recompute_segments(fn, names)
    (text,) = warnings(recomputed, W, X)
    assert text.startswith("region 3 of 4 (from 0) in `deep` frees nothing of the peak: ")
    assert "no_recompute_segments=... of jrc.recompute_segments" in text
    saved = jrc.recompute_segments(fn, names, no_recompute_segments=[3])
    assert warnings(saved, W, X) == [] and peak(saved) <= peak(recomputed)
    reports = [jrc.explain(each, W, X) for each in (recomputed, saved)]
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
def test_regions_that_the_derivative_needs_nothing_of(case):
    (text,) = warnings(lambda w, x: jnp.sum(jnp.cos(NEEDLESS[case](w, x @ w))), W, X)
    assert text.startswith("the region at test_explain_effect.py:") and text.endswith(
        "frees nothing: the derivative needs nothing that is made inside. Leave out the wrap."
    )


def test_a_region_around_regions():
    """Around two regions it frees the value between them, around one it frees nothing."""
    fn = functools.partial(deep, wrap=jax.checkpoint)
    assert warnings(jrc.recompute_segments(fn, ["block_1"]), W, X) == []
    (text,) = warnings(jrc.recompute_segments(fn, ["block_0"]), W, X)
    assert "in `deep` frees nothing: the derivative needs nothing" in text


def test_no_warning_for_a_region_in_a_loop():
    def loss(wrap, w, x):
        step = lambda c, _: (wrap(w, c), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, None, length=4)[0])

    assert warnings(functools.partial(loss, jax.checkpoint(block)), W, X) == []


def test_a_name_that_a_policy_saves_and_nothing_has():
    def loss(name, w, x):
        def inner(w, x):
            return jnp.sin(name(jnp.sin(x @ w)) @ w)

        run = jax.checkpoint(inner, policy=POLICIES.save_only_these_names("h"))
        for _ in range(2):
            x = run(w, x)
        return jnp.sum(jnp.exp(jnp.cos(jnp.sin(x))))

    line = loss.__code__.co_firstlineno + 6
    assert warnings(functools.partial(loss, lambda x: checkpoint_name(x, "h")), W, X) == []
    (text,) = warnings(functools.partial(loss, lambda x: checkpoint_name(x, "g")), W, X)
    assert text == (
        f"the policy of the jax.checkpoint region at test_explain_effect.py:{line} saves 'h', a "
        "name that nothing inside has: it has 'g'. Correct the policy."
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
def test_a_policy_that_jax_ignores(policy):
    """With `jax_remat3` sines are recomputed although a policy saves them."""
    fn = functools.partial(deep, wrap=lambda block: jax.checkpoint(block, policy=policy))
    found = [text for text in warnings(fn, W, X) if text.startswith("the policy")]
    is_custom = policy is keeps_sines or getattr(policy, "__name__", "") == "<lambda>"
    if jax.config.jax_remat3 and is_custom:
        (text,) = found
        assert "saves 'sin'" in text or "'sin'" in text
        assert "jax_remat3 asks a policy about named values and matrix products only" in text
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
    recomputed = jrc.recompute_segments(deep, ["block_1", "nothing"], rule="fluid")
    (text,) = jrc.explain(recomputed, W, X).warnings
    assert text.startswith("jrc.recompute_segments: boundary 'nothing' cuts nothing: ")
    # The same warning at each call.
    assert jrc.explain(recomputed, W, X).warnings == (text,)


def tagged_net(tag, w, x):
    for _ in range(2):
        x = jrc.mark(jnp.sin(tag(jnp.cos)(x @ w) @ w), "h")
    return jnp.sum(jnp.exp(jnp.sin(x @ w)))


def tagged_loop(tag, scan, w, x):
    def step(carry, _):
        return jnp.sin(tag(jnp.cos)(carry @ w) @ w), None

    return jnp.sum(jnp.exp(scan(step, x, None, length=3)[0]))


def rerun_loop(*args, **options):
    return jrc.recompute_scan(*args, **options, segments=3)


# Functions of a tag, and whether `keep_op` and `recompute_op` have an effect inside of them.
TAGGED = {
    "alone": (lambda tag: functools.partial(tagged_net, tag), False, True),
    "segments": (
        lambda tag: jrc.recompute_segments(functools.partial(tagged_net, tag), ["h", "h#2"]),
        True,
        True,
    ),
    "rules": (lambda tag: jrc.apply_rules(functools.partial(tagged_net, tag)), False, True),
    "recompute": (
        lambda tag: lambda w, x: jrc.recompute(functools.partial(tagged_net, tag), w, x),
        True,
        True,
    ),
    "jax.checkpoint": (
        lambda tag: jax.checkpoint(functools.partial(tagged_net, tag)),
        False,
        True,
    ),
    "loop": (lambda tag: functools.partial(tagged_loop, tag, jax.lax.scan), False, True),
    "recomputed loop": (lambda tag: functools.partial(tagged_loop, tag, rerun_loop), False, True),
}


@pytest.mark.parametrize("case", TAGGED)
def test_tags_that_nothing_acts_on(case):
    make, keeps, recomputes = TAGGED[case]
    for tag, acts in ((jrc.keep_op, keeps), (jrc.recompute_op, recomputes)):
        found = [text for text in warnings(make(tag), W, X) if "_op" in text.partition(" has")[0]]
        if acts:
            assert found == []
        else:
            (text,) = found
            assert text.startswith(f"jrc.{tag.__name__} ") and " has no effect: " in text
            assert case == "rules" or " at test_explain_effect.py:" in text
