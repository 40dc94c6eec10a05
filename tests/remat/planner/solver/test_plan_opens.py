"""What users already did is planned too: `jax.checkpoint`, branches, custom derivatives."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jrc
from jrc._jaxpr import flops
from jrc.remat import memory_needed
from jrc.remat._planner.plan.decision import Branches, walk
from tests.draws import normal
from tests.processes import run_python
from tests.remat.measure import bit_equal, largest_error, operators
from tests.remat.planner.problems import (
    applied,
    gradient_of,
    lean_of,
    named,
    plan_as,
    problem_of,
    program_of,
    row_of,
)

policies = jax.checkpoint_policies
KEY = jax.random.key(0)
WS = [normal(i, 32, 32, scale=0.2) for i in range(6)]
X = normal(6, 64, 32)
AS_WRITTEN = "your jax.checkpoint as written"


def block(x, w):
    return checkpoint_name(jnp.tanh(jnp.sin(x @ w)), "out")


def stack(wrap):
    def loss(ws, x):
        for w in ws:
            x = wrap(x, w)
        return jnp.sum(x)

    return loss


def scanned(wrap):
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda c, w: (wrap(c, w), None), x, jnp.stack(ws))[0])

    return loss


def branched(wrap):
    def loss(ws, x):
        for w in ws:
            x = jax.lax.cond(x[0, 0] > 0, wrap, lambda x, w: jnp.cos(x) + w[:1], x, w)
        return jnp.sum(x)

    return loss


def in_jit(wrap):
    return stack(jax.jit(lambda x, w: jnp.sin(wrap(jax.jit(jnp.sin)(x), w))))


WRAPS = {
    "checkpoint": jax.checkpoint,
    "dots_saveable": functools.partial(jax.checkpoint, policy=policies.dots_saveable),
    "names": functools.partial(jax.checkpoint, policy=policies.save_only_these_names("out")),
    "no cse": functools.partial(jax.checkpoint, prevent_cse=False),
    "nested": lambda f: jax.checkpoint(lambda x, w: jnp.cos(jax.checkpoint(f)(x, w))),
    "of a jit": lambda f: jax.checkpoint(jax.jit(f)),
}
SHAPES = {"stack": stack, "scan": scanned, "cond": branched, "jit": in_jit}


def plain(name):
    """The wrapped block without `jax.checkpoint`."""
    return (lambda f: lambda x, w: jnp.cos(f(x, w))) if name == "nested" else lambda f: f


@functools.cache
def problem_without(shape, is_nested):
    return problem_of(SHAPES[shape](plain("nested" if is_nested else "")(block)), (WS, X))


@pytest.mark.slow(after=5)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["checkpoint", "dots_saveable", "names", "no cse", "nested"])
def test_a_region_is_planned_like_the_rest(name, shape):
    written = SHAPES[shape](WRAPS[name](block))
    one, other = problem_of(written, (WS, X)), problem_without(shape, name == "nested")
    assert one.function.signature == other.function.signature
    assert row_of(one) == row_of(other) and one.flops == other.flops
    assert other.function.traced.regions == 0 < one.function.traced.regions


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPS)
def test_gradients_are_those_of_the_function(name):
    fn = scanned(WRAPS[name](block)) if name != "of a jit" else stack(WRAPS[name](block))
    found = problem_of(fn, (WS, X))
    expected = jax.jit(jax.grad(fn))(WS, X)
    for option in (lean_of(found), found.baseline, found.manual[-1], named(found)[AS_WRITTEN]):
        assert largest_error(jax.jit(jax.grad(applied(found, option)))(WS, X), expected) < 1e-6


@pytest.mark.slow
def test_nothing_recomputed_is_without_the_regions():
    fn = stack(jax.checkpoint(block))
    free = jrc.plan(fn, WS, X, budget=1.0)
    assert not free.reruns and free.verified.flops_ratio == 1.0
    products = [
        operators(jax.grad(f), WS, X)["dot_general"] for f in (free.apply(fn), stack(block), fn)
    ]
    assert products[0] == products[1] < products[2]


@pytest.mark.slow
def test_the_function_as_written_stands_beside_the_plan():
    fn = stack(jax.checkpoint(block))
    lean = jrc.plan(fn, WS, X, budget=0.0)
    (own,) = [each for each in lean.candidates if each.name == AS_WRITTEN]
    gradient = jax.make_jaxpr(jax.value_and_grad(fn))(WS, X)
    assert own.predicted.flops == flops(gradient) and own.predicted.flops_ratio > 1
    compiled = memory_needed(jax.jit(jax.value_and_grad(fn)).lower(WS, X)).peak
    assert abs(own.predicted.peak_bytes - compiled) < 0.15 * compiled
    assert AS_WRITTEN in str(lean)
    assert lean.verified.peak_bytes <= 1.01 * compiled
    assert not [each for each in guess(stack(block)).candidates if each.name == AS_WRITTEN]


def guess(fn, *args, **kwargs):
    return jrc.plan(fn, *(args or (WS, X)), **{"budget": 2**40, "verify": False} | kwargs)


def test_the_function_as_written_is_a_plan_too():
    fn = stack(jax.checkpoint(block))
    found = problem_of(fn, (WS, X))
    own = named(found)[AS_WRITTEN]
    assert operators(jax.grad(applied(found, own)), WS, X) == operators(jax.grad(fn), WS, X)
    plan = plan_as(found, own)
    assert jrc.Plan.from_json(plan.to_json()) == plan and "as it is" in str(plan)
    assert operators(jax.grad(plan.apply(fn)), WS, X) == operators(jax.grad(fn), WS, X)


def test_regions_are_respected_where_that_is_asked_for():
    fn = stack(jax.checkpoint(block))
    kept, opened = guess(fn, respect_checkpoints=True), guess(fn)
    assert any(each.startswith("remat2") or "Remat" in each for each in kept.signature.equations)
    assert len(opened.signature.equations) > len(kept.signature.equations)
    assert not [each for each in kept.candidates if each.name == AS_WRITTEN]
    same = jrc.Plan.from_json(kept.to_json())
    assert same == kept and same.signature.respect_checkpoints
    for plan in (kept, same):
        # Nothing else is recomputed, and what the user wrote is.
        assert operators(jax.grad(plan.apply(fn)), WS, X) == operators(jax.grad(fn), WS, X)
    with pytest.raises(ValueError, match="another program"):
        kept.apply(stack(block))(WS, X)
    with pytest.raises(TypeError, match="respect_checkpoints"):
        guess(fn, respect_checkpoints="no")


def test_a_plan_without_regions_fits_the_function_with_them():
    """The program is the same, so a plan goes from one to the other."""
    plan = guess(stack(block), budget=0.0)
    with_regions = plan.apply(stack(jax.checkpoint(block)))
    assert bit_equal(
        jax.jit(jax.grad(with_regions))(WS, X), jax.jit(jax.grad(plan.apply(stack(block))))(WS, X)
    )


@pytest.mark.slow
def test_draws_inside_of_a_region_stay():
    def dropped(x, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x @ w), 0)

    def loss(ws, x, key):
        for w in ws:
            key, now = jax.random.split(key)
            x = jax.checkpoint(dropped)(x, w, now)
        return jnp.sum(x**2)

    found = problem_of(loss, (WS, X, KEY))
    expected = jax.jit(jax.grad(loss))(WS, X, KEY)
    for option in (lean_of(found), found.baseline):
        got = jax.jit(jax.grad(applied(found, option)))(WS, X, KEY)
        assert largest_error(got, expected) < 1e-6


def test_a_region_of_a_backward_pass_stays():
    """A loss that contains a gradient, as that of a physics-informed network does."""

    def loss(ws, x):
        grads = jax.grad(stack(jax.checkpoint(block)))(ws, x)
        return sum(jnp.sum(g**2) for g in grads)

    found = problem_of(loss, (WS[:2], X))
    expected = jax.jit(jax.grad(loss))(WS[:2], X)
    got = jax.jit(jax.grad(applied(found, lean_of(found))))(WS[:2], X)
    assert largest_error(got, expected) < 1e-5


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(32)(jnp.sin(nn.Dense(64)(x))))


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat_scan(Block, lengths=(4, 4))()(x)


class Wrapped(nn.Module):
    wrap: object

    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = self.wrap(Block)(name=f"block_{i}")(x)
        return x


def of_linen(model):
    params = model.init(KEY, X)
    return (lambda params, x: jnp.sum(model.apply(params, x) ** 2)), params


def test_linen_modules_under_remat():
    one, params = of_linen(Wrapped(nn.remat))
    other, _ = of_linen(Wrapped(lambda block: block))
    rows = [row_of(problem_of(fn, (params, X))) for fn in (one, other)]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_linen_remat_scan():
    fn, params = of_linen(Scanned())
    found = problem_of(fn, (params, X))
    assert found.function.traced.regions and found.front
    got = jax.jit(jax.grad(applied(found, lean_of(found))))(params, X)
    assert largest_error(got, jax.jit(jax.grad(fn))(params, X)) < 1e-6


def test_nnx_modules_under_remat():
    class Net(nnx.Module):
        def __init__(self, wrap, rngs):
            self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(4)])
            self.wrap = wrap

        def __call__(self, x):
            for layer in self.layers:
                x = self.wrap(lambda layer, x: jnp.tanh(jnp.sin(layer(x))))(layer, x)
            return x

    def loss(model, x):
        return jnp.sum(model(x))

    wraps = nnx.remat, lambda f: f
    one, other = (problem_of(loss, (Net(wrap, nnx.Rngs(0)), X)) for wrap in wraps)
    assert row_of(one) == row_of(other)


def test_regions_of_this_package_are_opened():
    marked = lambda ws, x: stack(lambda x, w: jrc.mark(block(x, w), "block"))(ws, x)  # noqa: E731
    segments = jrc.recompute_segments(marked, ["block"])
    found = problem_of(segments, (WS, X))
    assert found.function.traced.regions and found.front
    assert not any("jrc." in each.name for each in guess(segments, budget=0.0).kept)
    got = jax.jit(jax.grad(applied(found, lean_of(found))))(WS, X)
    assert largest_error(got, jax.jit(jax.grad(marked))(WS, X)) < 1e-6


def deep(ws, x):
    for w in ws:
        x = jnp.tanh(jnp.sin(x @ w))
    return x


def conditional(ws, x):
    x = jnp.sin(x @ ws[0])
    x = jax.lax.cond(x[0, 0] > 0, lambda: deep(ws[1:5], x), lambda: deep(ws[2:4], jnp.cos(x)))
    return jnp.sum(jnp.sin(x @ ws[5]))


def switched(ws, x):
    index = jnp.int32(jnp.sum(x) > 0) + 1
    branches = [lambda x: x, lambda x: deep(ws[:3], x), lambda x: deep(ws[3:], x)]
    return jnp.sum(jax.lax.switch(index, branches, x) ** 2) + jnp.sum(ws[0])


def conditional_steps(ws, x):
    def step(x, w):
        return jax.lax.cond(
            x[0, 0] > 0, lambda: deep([w, w, w], x), lambda: jax.jit(jnp.cos)(x) * 2
        ), None

    return jnp.sum(jax.lax.scan(step, x, jnp.stack(ws))[0])


@pytest.mark.slow
@pytest.mark.parametrize("fn", [conditional, switched, conditional_steps])
def test_branches_are_planned_inside(fn):
    found = problem_of(fn, (WS, X))
    lean, top = found.front[0], found.baseline
    stages = [
        stage
        for option in found.front
        for _, decision, _ in walk(program_of(found), option.stages)
        for stage in decision.stages
    ]
    assert any(isinstance(each, Branches) and any(each.branches) for each in stages)
    counted = flops(gradient_of(found, lean))
    assert counted == pytest.approx(found.flops_of(lean), rel=1e-6)
    peaks = [memory_needed(found.gradient.lower(each.whole).lowered).peak for each in (lean, top)]
    assert peaks[0] < 0.9 * peaks[1]
    expected = jax.jit(jax.value_and_grad(fn))(WS, X)
    for option in row_of(found)[:3]:
        got = jax.jit(jax.value_and_grad(applied(found, option)))(WS, X)
        assert largest_error(got, expected) < 1e-6
        plan = plan_as(found, option)
        again = jrc.Plan.from_json(plan.to_json())
        assert again == plan
        assert largest_error(jax.jit(jax.value_and_grad(again.apply(fn)))(WS, X), expected) < 1e-6


def softmax_rule(saved):
    """A `custom_vjp` that saves its result, or something else beside it."""

    @jax.custom_vjp
    def attend(x, w):
        return jax.nn.softmax(x @ w)

    def forward(x, w):
        y = jax.nn.softmax(x @ w)
        return y, {"result": (x, w, y), "operands": (x, w), "more": (x, w, jnp.exp(x @ w))}[saved]

    def backward(saved, c):
        for y in saved[2:]:
            c = c * y
        return c @ saved[1].T, saved[0].T @ c

    attend.defvjp(forward, backward)
    return attend


@jax.custom_jvp
def product(x, w):
    return jnp.sin(x @ w)


@product.defjvp
def product_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    z = x @ w
    return jnp.sin(z), jnp.cos(z) * (dx @ w + x @ dw)


RULES = {saved: softmax_rule(saved) for saved in ("result", "operands", "more")}
RULES["custom_jvp"] = product


def ruled(rule):
    def loss(ws, x):
        for w in ws:
            x = rule(jnp.sin(x), w)
        return jnp.sum(x**2)

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_what_has_a_rule_of_its_own_is_counted_exactly(name):
    """Its forward rule runs again inside of a region; what it saves counts once."""
    fn = ruled(RULES[name])
    found = problem_of(fn, (WS, X))
    expected = jax.jit(jax.grad(fn))(WS, X)
    row = row_of(found)
    for option in (row[0], row[len(row) // 2]):
        counted = flops(gradient_of(found, option))
        assert counted == pytest.approx(found.flops_of(option), rel=1e-6)
        got = jax.jit(jax.grad(applied(found, option)))(WS, X)
        assert largest_error(got, expected) < 1e-5
    assert any(len(region.recomputed) > 1 for region in row[0].stages.regions)
    own = {"result": X.nbytes, "operands": 0, "more": X.nbytes, "custom_jvp": X.nbytes}
    if name != "custom_jvp":
        (opaque,) = guess(fn).opaque
        assert (opaque.bytes, opaque.times) == (6 * own[name], 6)


def test_what_stays_opaque_is_named_with_its_bytes():
    fn = ruled(RULES["more"])
    line = "opaque: 6 x custom_vjp_call of attend at test_plan_opens.py:"
    free, lean = guess(fn), guess(fn, budget=0.0)
    assert line in str(free) and "KiB saved" in str(free)
    assert any(each.recomputed for each in lean.opaque) and " recomputed" in str(lean)
    assert jrc.Plan.from_json(lean.to_json()).opaque == lean.opaque
    report = jrc.explain(fn, WS, X)
    (opaque,) = report.opaque
    assert line in str(report) and opaque.bytes == 6 * X.nbytes
    assert jrc.Report.from_json(report.to_json()) == report
    assert not guess(stack(jax.checkpoint(block))).opaque


def test_what_is_opaque_inside_of_loops_and_branches():
    rule = RULES["more"]

    def loss(ws, x):
        def step(x, w):
            x = jax.lax.cond(x[0, 0] > 0, lambda: rule(x, w), lambda: x)
            return rule(x, w), None

        return jnp.sum(jax.lax.scan(step, x, jnp.stack(ws))[0] ** 2)

    assert sorted(each.times for each in guess(loss).opaque) == [6, 6]
    assert {each.times for each in jrc.explain(loss, WS, X).opaque} == {6}


def test_regions_as_written_are_for_the_function_that_has_them():
    """Without its regions, or with another policy, a function would need more than was promised."""

    def net(wrap):
        layer = wrap(lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w))
        return lambda w, x: jnp.sum(layer(w, layer(w, x)))

    args = jnp.eye(16), jnp.ones((64, 16))
    policies = jax.checkpoint_policies
    wraps = [
        functools.partial(jax.checkpoint, policy=policy)
        for policy in (
            policies.save_only_these_names("a"),
            policies.save_only_these_names("b"),
            policies.dots_saveable,
        )
    ]
    problem = problem_of(net(wraps[0]), args)
    plan = jrc.Plan.from_json(plan_as(problem, named(problem)[AS_WRITTEN]).to_json())
    jax.grad(plan.apply(net(wraps[0])))(*args)
    for wrap in (*wraps[1:], lambda layer: layer):
        with pytest.raises(ValueError, match=r"its jax\.checkpoint regions, .*, are others"):
            jax.grad(plan.apply(net(wrap)))(*args)


def test_the_largest_batch_respects_regions():
    fn = lambda w, x: jnp.sum(jax.checkpoint(lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w))(w, x))  # noqa: E731
    args = lambda batch: (jnp.eye(16), jax.ShapeDtypeStruct((batch, 16), jnp.float32))  # noqa: E731
    options = dict(multiple_of=8, most=64)
    found = jrc.largest_batch(args, fn, "20kB", respect_checkpoints=True, **options)
    assert found.plan.signature.respect_checkpoints and found.recomputed >= found.plain > 0
    with pytest.raises(TypeError, match="respect_checkpoints"):
        jrc.largest_batch(args, fn, "20kB", respect_checkpoints="no", **options)


def test_regions_that_are_respected_are_named():
    fn = stack(WRAPS["dots_saveable"](block))
    (opaque,) = guess(fn, respect_checkpoints=True).opaque
    assert opaque.times == 6 and ("remat2" in opaque.name or "Remat" in opaque.name)
    assert opaque.bytes == 6 * X.nbytes


@pytest.mark.exhaustive
def test_all_of_it_with_the_next_remat():
    """JAX's remat of the future writes regions and names in another form."""
    code = """
import jax
from tests.remat.planner.solver import test_plan_opens as t
assert jax.config.jax_remat3
for name, shapes in {"checkpoint": ("scan", "cond"), "names": ("stack", "jit")}.items():
    for shape in shapes:
        t.test_a_region_is_planned_like_the_rest(name, shape)
    t.test_gradients_are_those_of_the_function(name)
t.test_regions_are_respected_where_that_is_asked_for()
t.test_branches_are_planned_inside(t.conditional)
t.test_what_has_a_rule_of_its_own_is_counted_exactly("more")
"""
    run_python(code, JAX_REMAT3="1")


@jax.custom_vjp
def reads_many(*values):
    return sum(values)


def reads_many_forward(*values):
    return sum(values), values


reads_many.defvjp(reads_many_forward, lambda values, g: tuple(g * jnp.cos(v) for v in values))


@pytest.mark.slow
def test_an_opaque_function_may_read_many_values():
    """Each may be saved or recomputed: in all 2 to the power of 20 ways, too many to look at."""

    def loss(ws, x):
        for w in ws:
            x = reads_many(*(jnp.tanh(x * w + i) for i in range(20)))
        return jnp.mean(x**2)

    ws, x = [jnp.ones((1, 8)) / 8] * 2, jnp.ones((256, 8))
    lean, free = (
        jrc.plan(loss, ws, x, budget=each, verify=False, minimize="flops") for each in (0.0, 1.0)
    )
    assert lean.predicted.peak_bytes < 0.75 * free.predicted.peak_bytes
    plain, planned = (jax.jit(jax.grad(fn))(ws, x) for fn in (loss, lean.apply(loss)))
    assert all(map(jnp.allclose, planned, plain))
