"""`jrc.recompute` traces a function once, and never returns stale constants."""

import collections
import functools
import itertools
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jrc
from tests.remat.measure import largest_error

W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
X = jnp.linspace(-0.4, 0.6, 16).reshape(4, 4)
SCALE = 1.0
both = pytest.mark.parametrize("reentrant", [True, False])


@both
def test_a_loop_over_one_block_traces_it_once(reentrant, capsys):
    def block(w, x):
        print("traced")
        return jnp.sin(x @ w)

    def loss(w, x, call):
        for _ in range(10):
            x = call(block, w, x)
        return jnp.sum(x)

    def traces():
        return capsys.readouterr().out.count("traced")

    again = functools.partial(jrc.recompute, use_reentrant=reentrant)
    got = jax.grad(loss)(W, X, again)
    assert traces() == 1
    jax.jit(jax.grad(loss), static_argnums=2)(W, X, again)
    assert traces() == 0
    # Another shape is another trace.
    jax.grad(loss)(W, X[:2], again)
    assert traces() == 1
    assert largest_error(got, jax.grad(loss)(W, X, lambda f, *args: f(*args))) < 1e-6


class Settings:
    scale = 1.0

    def scaled(self, x):
        return x * SCALE

    @staticmethod
    def factor():
        return SCALE


class Table(dict):
    scale = 1.0


@jax.custom_vjp
def custom(x):
    return x * SCALE


custom.defvjp(lambda x: (custom(x), None), lambda _, ct: (ct * SCALE,))


def of_attribute(x):
    return x * of_attribute.scale


def of_import(x):
    from tests.remat.segments.test_trace_once import SCALE

    return x * SCALE


# Functions, each with what it captures somewhere that a change can hide.
HIDDEN = {
    "class attribute": lambda x: x * Settings.scale,
    "method of an object": lambda x: SETTINGS.scaled(x),
    "static method": lambda x: x * Settings.factor(),
    "method": None,
    "module": lambda x: x * sys.modules[__name__].SCALE,
    "import inside": of_import,
    "attribute of a function": of_attribute,
    "subclass of dict": lambda x: x * TABLE.scale,
    "function with a custom rule": lambda x: custom(x),
    "ordered dict": lambda x: x * ORDERED["scale"],
    "array of NumPy": lambda x: x * float(ARRAY[0]),
}
SETTINGS, TABLE, ARRAY = Settings(), Table(), np.ones(1)
ORDERED = collections.OrderedDict(scale=1.0)
HIDDEN["method"] = SETTINGS.scaled


@both
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_changes_are_seen(name, reentrant, monkeypatch):
    for value in (2.0, 3.0, 4.0):
        monkeypatch.setattr(sys.modules[__name__], "SCALE", value)
        monkeypatch.setattr(Settings, "scale", value)
        monkeypatch.setattr(TABLE, "scale", value, raising=False)
        monkeypatch.setattr(of_attribute, "scale", value, raising=False)
        monkeypatch.setitem(ORDERED, "scale", value)
        ARRAY[0] = value
        got = jrc.recompute(HIDDEN[name], X, use_reentrant=reentrant)
        assert largest_error(got, X * value) < 1e-6


def test_functions_that_change_what_they_capture_run_every_time():
    count, draws, steps = {"i": 0}, random.Random(0), itertools.count(1)

    def counted(x):
        count["i"] += 1
        return x * count["i"]

    results = [float(jrc.recompute(counted, jnp.float32(1))) for _ in range(3)]
    assert results == [1, 2, 3]
    results = [float(jrc.recompute(lambda x: x * next(steps), jnp.float32(1))) for _ in range(3)]
    assert results == [1, 2, 3]
    drawn = lambda x: x * draws.random()  # noqa: E731
    assert len({float(jrc.recompute(drawn, jnp.float32(1))) for _ in range(3)}) == 3
    stepped = lambda x: x * next(steps)  # noqa: E731
    assert len({float(jrc.recompute(stepped, jnp.float32(1))) for _ in range(3)}) == 3


def test_changing_globals_cells_defaults_and_attributes_are_seen():
    global SCALE

    def of_global(x):
        return jnp.sin(x) * SCALE

    scale = 1.0

    def of_cell(x):
        return jnp.sin(x) * scale

    def of_default(x, scale=1.0):
        return jnp.sin(x) * scale

    class Model:
        scale = 1.0

        def block(self, x):
            return jnp.sin(x) * self.scale

    model, table = Model(), {"scale": 1.0}

    def of_dict(x):
        return jnp.sin(x) * table["scale"]

    def outer(x):
        return of_global(x)

    for value in (1.0, 2.0, jnp.float32(3.0), 2.0):
        SCALE = scale = table["scale"] = model.scale = value
        of_default.__defaults__ = (value,)
        for function in (of_global, of_cell, of_default, model.block, of_dict, outer):
            want = jnp.sin(X) * value
            assert largest_error(jrc.recompute(function, X), want) < 1e-6
    SCALE = 1.0


def test_changing_modules_are_seen():
    layer = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    function = lambda x: layer(x)  # noqa: E731
    for scale in (1.0, 2.0):
        layer.kernel[...] = scale * W
        assert largest_error(jrc.recompute(function, X), X @ (scale * W)) < 1e-6

    class Slots:
        __slots__ = ("scale",)

    slots = Slots()
    for scale in (1.0, 2.0):
        slots.scale = scale
        assert largest_error(jrc.recompute(lambda x: x * slots.scale, X), X * scale) < 1e-6
    scaled = lambda x: x * slots.scale  # noqa: E731
    for scale in (1.0, 2.0):
        slots.scale = scale
        assert largest_error(jrc.recompute(scaled, X), X * scale) < 1e-6


def test_static_arguments_are_told_apart():
    def power(x, n, mode="sin"):
        return x**n if mode == "sin" else jnp.cos(x) ** n

    for n, mode in ((2, "sin"), (3, "sin"), (2, "cos"), (2.0, "sin"), (True, "sin")):
        got = jrc.recompute(power, X, n, mode=mode)
        assert largest_error(got, power(X, n, mode)) < 1e-6
    table = np.array([1.0, 2.0])
    take = lambda x: x * float(table[0])  # noqa: E731
    assert largest_error(jrc.recompute(take, X), X) < 1e-6
    table[0] = 5.0
    assert largest_error(jrc.recompute(take, X), 5 * X) < 1e-6


TRANSFORMS = {
    "grad": jax.grad,
    "jit": lambda f: jax.jit(jax.grad(f), static_argnums=2),
    "vmap": lambda f: (
        lambda w, x, call: jax.vmap(lambda w: jax.grad(f)(w, x, call))(jnp.stack([w, 2 * w]))
    ),
    "grad of grad": lambda f: jax.grad(lambda w, x, call: jnp.sum(jax.grad(f)(w, x, call) ** 2)),
}


@pytest.mark.slow(after=4)
@both
@pytest.mark.parametrize("name", TRANSFORMS)
def test_closures_over_tracers(name, reentrant):
    again = functools.partial(jrc.recompute, use_reentrant=reentrant)

    def loss(w, x, call):
        total = 0.0
        for i in range(3):
            shifted = w * (i + 1.0)
            block = lambda x: jnp.sin(x @ shifted)  # noqa: E731, B023
            partial = functools.partial(lambda w, x: jnp.cos(x @ w), shifted)
            x = call(block, x) + call(partial, x) + call(block, x)
            total += jnp.sum(x)
        return total

    plain = lambda f, *args: f(*args)  # noqa: E731
    got, want = (TRANSFORMS[name](loss)(W, X, call) for call in (again, plain))
    assert largest_error(got, want) < 1e-5


def test_one_function_in_many_traces_leaks_nothing():
    w = W

    def block(x):
        return jnp.sin(x @ w)

    def loss(new):
        nonlocal w
        w = new
        return jnp.sum(jrc.recompute(block, jrc.recompute(block, X)))

    for _ in range(2):
        got = jax.jit(jax.grad(loss))(W)
        assert (
            largest_error(got, jax.grad(lambda w: jnp.sum(jnp.sin(jnp.sin(X @ w) @ w)))(W)) < 1e-6
        )
        assert largest_error(jax.grad(loss)(2 * W), jax.jit(jax.grad(loss))(2 * W)) < 1e-6
    w = W
    assert largest_error(jrc.recompute(block, X), jnp.sin(X @ W)) < 1e-6


@pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False), reason="jax.checkpoint itself leaves its names behind"
)
def test_no_tracer_is_left_behind():
    def loss(w, x):
        for _ in range(2):
            x = jrc.recompute(lambda x: jnp.sin(x @ w), x)
        return jnp.sum(x)

    with jax.checking_leaks():
        jax.jit(jax.grad(loss)).lower(W, X)


def test_new_keys_draw_new_bits():
    def drop(x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    keys = jax.random.split(jax.random.key(0), 3)
    masks = [jrc.recompute(drop, jnp.ones(64), key) for key in keys]
    assert all(
        bool((mask == drop(jnp.ones(64), key)).all()) for mask, key in zip(masks, keys, strict=True)
    )
    closed = [jrc.recompute(lambda x: drop(x, key), jnp.ones(64)) for key in keys]  # noqa: B023
    assert all(bool((a == b).all()) for a, b in zip(masks, closed, strict=True))


def test_configuration_is_part_of_the_cache():
    product = lambda x: x @ x  # noqa: E731
    texts = []
    for precision in ("default", "highest"):
        with jax.default_matmul_precision(precision):
            texts.append(str(jax.make_jaxpr(lambda x: jrc.recompute(product, x))(X)))
    assert "HIGHEST" in texts[1] and "HIGHEST" not in texts[0]
