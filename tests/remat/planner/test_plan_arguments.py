"""Functions and arguments that a plan is made for: taken as a user means them, or told."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jrc
from jrc.remat import memory_needed
from jrc.remat._gradient.compiled_memory import memory_of
from tests.remat.measure import (
    largest_error,
)
from tests.remat.planner.plan_cases import (
    KEY,
    WS,
    X,
    guess,
    layers,
)
from tests.remat.planner.problems import problem_of


@pytest.mark.parametrize(
    "call, kind, text",
    [
        (lambda: jrc.plan(3, X, budget=1), TypeError, "fn must be a function, got int"),
        (lambda: jrc.plan(layers, WS, X, budget=1, argnums=2), ValueError, "of the 2 arguments"),
        (lambda: jrc.plan(layers, WS, X, budget=1, argnums=()), ValueError, "arguments () of"),
        (lambda: jrc.plan(layers, WS, X, budget=1, argnums=(0, -2)), ValueError, "each argument"),
        (lambda: jrc.plan(layers, WS, jnp.arange(4), budget=1, argnums=1), ValueError, "(1,) of"),
        (lambda: jrc.plan(layers, WS, X, budget=1, verify=1), TypeError, "verify"),
        (lambda: jrc.plan(layers, WS, X, budget=1, has_aux="no"), TypeError, "has_aux"),
    ],
)
def test_wrong_arguments(call, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        call()


@pytest.mark.slow
def test_shapes_are_planned_inside_of_a_trace_too():
    args = WS, jnp.ones((64, 4))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    inside = []

    @jax.jit
    def gradient(ws, x):
        inside.append(jrc.plan(layers, *shapes, budget=0.0))
        return jax.grad(inside[0].apply(layers))(ws, x)

    assert largest_error(gradient(*args), jax.grad(layers)(*args)) < 1e-6
    assert inside == [jrc.plan(layers, *args, budget=0.0)] and inside[0].reruns


def chosen(ws, x, mode, *, key=None):
    return layers(ws, x) if mode else 0.0 * layers(ws, x)


WRONG_FUNCTIONS = [
    (lambda ws, x: x, {}, "the loss, got float32[4, 4]. Sum or average what it returns."),
    (lambda ws, x: layers(ws, x) > 0, {}, "the loss, got bool[]."),
    (lambda ws, x: None, {}, "got NoneType. Return the loss alone; if it returns (loss, aux), "),
    (lambda ws, x: {"loss": layers(ws, x)}, {}, "the loss, got dict. Return the loss alone; if"),
    (lambda ws, x: (layers(ws, x), x), {}, "got tuple. Return the loss alone; if it returns"),
    (layers, {"has_aux": True}, "(loss, aux) with has_aux=True, got float32[]. If it"),
    (lambda ws, x: (x, x), {"has_aux": True}, "got float32[4, 4]. Sum or average"),
    (lambda ws, x: layers(ws, x) * 1j, {}, "got complex64[]. Take the real part of what it"),
    (lambda ws, x, *, key: layers(ws, x), {}, "missing a required keyword-only argument: 'key'."),
    (lambda ws: layers(ws, X), {}, "too many positional arguments. Bind others with"),
    (
        lambda ws, x: layers(ws, x) if x[0, 0] > 0 else 0.0,
        {},
        "must not need the value of a traced",
    ),
]


@pytest.mark.parametrize("fn, options, text", WRONG_FUNCTIONS)
def test_what_is_no_loss(fn, options, text):
    calls = {
        "jrc.plan": lambda: jrc.plan(fn, WS, X, budget=1.0, **options),
        "jrc.explain": lambda: jrc.explain(fn, WS, X, **options),
        "jrc.largest_batch": lambda: jrc.largest_batch(lambda n: (WS, X), fn, 1000, **options),
    }
    for who, call in calls.items():
        with pytest.raises(TypeError, match=re.escape(text)) as info:
            call()
        assert str(info.value).startswith(f"{who}: ")


def test_a_loss_that_is_a_number_of_python():
    with pytest.raises(TypeError, match=r"as a JAX array, got float, .*jnp\.asarray\(loss\)"):
        jrc.plan(lambda ws, x: 1.5, WS, X, budget=1.0)


@pytest.mark.parametrize("mode, text", [(True, "2 = True"), (2, "2 = 2")])
def test_numbers_are_traced_unless_their_values_are_needed(mode, text, caplog):
    fn = (lambda ws, x, n: layers(ws, x) * len(range(n))) if mode == 2 else chosen
    caplog.set_level("INFO", "jrc")
    plan = jrc.plan(fn, WS, jnp.tile(X, (8, 1)), mode, budget=0.0, verify=False)
    assert f"numbers among its arguments, which are passed as they are: {text}." in caplog.text
    args = WS, jnp.tile(X, (8, 1)), mode
    assert plan.reruns
    assert largest_error(jax.grad(plan.apply(fn))(*args), jax.grad(fn)(*args)) < 1e-6
    bound = functools.partial(chosen, mode=mode, key=KEY)
    assert jrc.plan(bound, WS, X, budget=0.0, verify=False).signature.equations


def test_an_error_beside_a_number_is_the_user_s_own():
    """Not that of the number being traced, which jrc alone tried."""

    def shapes(w, n):
        return jnp.sum(w.reshape(n, -1) * jnp.ones((7, 3)))

    def raises(w, n):
        if n > 2:
            raise RuntimeError("too many")
        return jnp.sum(w)

    with pytest.raises(TypeError, match="incompatible shapes"):
        jrc.plan(shapes, jnp.ones((16, 16)), 4, budget=0.5)
    with pytest.raises(RuntimeError, match="too many"):
        jrc.plan(raises, jnp.ones((16, 16)), 4, budget=0.5)


def test_closed_over_arrays_are_no_arguments():
    """XLA has them as constants of the program."""
    frozen = jnp.ones((64, 64))
    args = jnp.ones((4, 64)), jnp.ones((8, 4))
    problem = problem_of(lambda w, x: jnp.sum(jnp.tanh(x @ w @ frozen)), args)
    lowered = problem.gradient.lower(problem.baseline.whole).lowered
    assert problem.given == memory_needed(lowered).arguments


def test_an_array_whose_value_is_needed():
    text = r"jrc\.plan: `.*` must not need the value of .* Pass a number of Python .* reports: \S"
    with pytest.raises(TypeError, match=text):
        jrc.plan(chosen, WS, X, jnp.asarray(True), budget=1.0)
    text = text.replace("plan", r"Plan\.apply", 1)
    with pytest.raises(TypeError, match=text):
        guess("layers tanh").apply(chosen)(WS, X, jnp.asarray(True))


def stretched(p, x):
    """A shape depends on one number, a branch on another, and a third is a factor."""
    x = jnp.tanh(x.reshape(-1, p["width"]) @ p["w"])
    for _ in range(4):
        x = jnp.tanh(x @ p["w"]) * (p["scale"] if p["rate"] > 0 else 1.0)
    return jnp.sum(x)


@pytest.mark.exhaustive(after=1)
@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.5, np.float32(0.5)])
def test_a_module_with_numbers_that_python_reads(rate):
    """`equinox.nn.Dropout` is such a module: of its leaves one is a float, one a flag."""
    p = {"w": WS[0], "width": 4, "scale": 0.5, "rate": rate}
    x = jnp.ones((256,))
    assert jrc.explain(stretched, p, x).saved
    plan = jrc.plan(stretched, p, x, budget=0.0)
    assert plan.reruns
    by_hand = lambda fn: jax.grad(lambda w: fn({**p, "w": w}, x))(p["w"])  # noqa: E731
    assert largest_error(by_hand(plan.apply(stretched)), by_hand(stretched)) < 1e-6
    found = jrc.largest_batch(lambda n: (p, jnp.ones((4 * n,))), stretched, "20kB", most=512)
    assert 0 < found.plain < found.recomputed
    p["rate"] = 0.0
    assert largest_error(by_hand(plan.apply(stretched)), by_hand(stretched)) < 1e-6


def test_a_number_that_is_differentiated_beside_a_text():
    """The text is another argument: `jax.grad` takes the number."""

    def fn(ws, rate, x, mode):
        return layers(ws, x) * rate

    args = WS, 0.5, jnp.tile(X, (64, 1)), "train"
    plan = jrc.plan(fn, *args, argnums=(0, 1), budget=0.5)
    gradient = jax.value_and_grad(plan.apply(fn), (0, 1))
    compiled = jax.jit(gradient, static_argnums=3).lower(*args).compile()
    assert plan.verified.peak_bytes == memory_of(compiled).peak
    report = jrc.explain(fn, *args, argnums=(0, 1))
    plain = jax.jit(jax.value_and_grad(fn, (0, 1)), static_argnums=3).lower(*args).compile()
    assert report.memory.peak == memory_of(plain).peak


def test_a_number_that_is_the_only_thing_differentiated():
    fn = lambda n, x: jnp.sum(x) * n if n > 0 else jnp.sum(x)  # noqa: E731
    for call in (functools.partial(jrc.plan, budget=1.0), jrc.explain):
        with pytest.raises(ValueError, match="an argument with a floating array"):
            call(fn, 2.0, X)


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize("other", ["train", None, jnp.tanh, ("a", {"b": print})])
def test_what_is_no_array_stays_what_it_is(other):
    def fn(ws, x, other, scale):
        return layers(ws, x, jnp.tanh if other == "train" else jnp.sin) * scale

    plan = jrc.plan(fn, WS, jnp.tile(X, (8, 1)), other, 2.0, budget=0.0)
    args = WS, jnp.tile(X, (8, 1)), other, 2.0
    assert largest_error(jax.grad(plan.apply(fn))(*args), jax.grad(fn)(*args)) < 1e-6
    if other == "train":
        with pytest.raises(ValueError, match=r"equation \d+ was tanh:float32.*, now it is sin:"):
            plan.apply(fn)(*args[:2], "eval", 2.0)


@pytest.mark.slow
def test_leaves_that_have_no_gradient():
    """Steps, keys and flags in what is differentiated: as `jax.grad` takes them, or by hand."""

    def fn(state, x):
        x = x * jax.random.bernoulli(state["key"], 0.5, (1, x.shape[1])) * state["step"]
        return layers(state["ws"], x)

    state = {"ws": WS, "step": jnp.int32(3), "key": jax.random.key(0), "name": "net"}
    x = jnp.tile(X, (8, 1))
    lean = jrc.plan(fn, state, x, budget=0.0, verify=False)
    assert jrc.plan(fn, state, x, budget=1.0).verified.flops == lean.unplanned_flops
    by_hand = lambda f: jax.grad(lambda ws: f({**state, "ws": ws}, x))(WS)  # noqa: E731
    assert lean.reruns and largest_error(by_hand(lean.apply(fn)), by_hand(fn)) < 1e-6
    state = {key: leaf for key, leaf in state.items() if key != "name"}
    plain, recomputed = (jax.grad(f, allow_int=True)(state, x)["ws"] for f in (fn, lean.apply(fn)))
    assert largest_error(recomputed, plain) < 1e-6


class Counting(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(3)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = self.dropout(jnp.tanh(self.norm(layer(x))))
        return x


def counted(module, x):
    return jnp.sum(module(x) ** 2)


@functools.cache
def counting_plan():
    return jrc.plan(counted, Counting(), jnp.tile(X, (8, 1)), budget=0.0, verify=False)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [nnx.grad, lambda f: nnx.jit(nnx.grad(f))])
def test_what_a_function_changes_in_a_module_is_changed(transform):
    """Twice: the second step draws other masks, and goes on from the means of the first."""
    lean, x = counting_plan(), jnp.tile(X, (8, 1))
    modules, fns = [Counting(), Counting()], [counted, lean.apply(counted)]
    assert lean.reruns
    for step in (1, 2):
        plain, recomputed = (transform(f)(m, x) for f, m in zip(fns, modules, strict=True))
        # BatchNorm loses digits; another mask would be off by all of them.
        assert largest_error(recomputed, plain) < 1e-3
        assert [m.dropout.rngs.count[...] for m in modules] == [3 * step] * 2
        assert largest_error(*(m.norm.mean[...] for m in modules)) < 1e-6


def test_a_module_that_is_taken_apart_by_hand():
    graph, params, rest = nnx.split(Counting(), nnx.Param, ...)
    x, lean = jnp.tile(X, (8, 1)), counting_plan().apply(counted)

    def step(fn, params):
        module = nnx.merge(graph, params, rest, copy=True)
        return fn(module, x), nnx.state(module, nnx.BatchStat)

    plain, recomputed = (
        jax.jit(jax.grad(functools.partial(step, f), has_aux=True))(params) for f in (counted, lean)
    )
    assert largest_error(recomputed, plain) < 1e-5


def test_modules_that_a_plan_cannot_change():
    shared = Counting()
    shared.again = shared.norm
    x, shares = jnp.tile(X, (8, 1)), "that two modules share, got a BatchStat, which a plan sees"
    with pytest.raises(ValueError, match=rf"jrc\.plan: `counted` must not .* {shares}"):
        jrc.plan(counted, shared, x, budget=0.0)
    with pytest.raises(ValueError, match=shares):
        counting_plan().apply(counted)(shared, x)

    def grows(module, x):
        module.new = nnx.BatchStat(x)
        return counted(module, x)

    with pytest.raises(ValueError, match=r"jrc\.plan: `grows` must not add or remove variables"):
        jrc.plan(grows, Counting(), X, budget=1.0)


@pytest.mark.parametrize("made", [None, "high", "highest", "tensorfloat32"])
def test_a_plan_is_for_any_precision_of_products(made):
    """Neither changes what depends on what."""
    params, x = [jnp.eye(16)] * 3, jnp.ones((64, 16))

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    with jax.default_matmul_precision(made):
        plan = jrc.plan(loss, params, x, budget="1GiB", compilations=1, chunks=False)
    for used in (None, "highest", "BF16_BF16_F32"):
        with jax.default_matmul_precision(used):
            jax.eval_shape(jax.grad(plan.apply(loss)), params, x)
