"""Functions of every kind that a plan must leave as they are: operators, rules, loops, keys."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jrc
from tests.draws import integers, normal, parameters
from tests.remat.planner.problems import plan_as, problem_of, row_of

W = jnp.asarray(np.linspace(-0.5, 0.5, 16, dtype=np.float32).reshape(4, 4))
X = jnp.asarray(np.linspace(-0.4, 0.6, 16, dtype=np.float32).reshape(4, 4))
WS = [W + 0.1 * i for i in range(4)]
KEY = jax.random.key(1)
RAW_KEY = jax.random.PRNGKey(1)
TABLE = jnp.asarray(np.arange(16, dtype=np.float32).reshape(4, 4) / 9)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function with its arguments.

    `exact`: no value is read by three others and no weight twice, so that no sum is made in
    another order. `tolerance`: of a gradient under `jit`, relative to a leaf's largest entry.
    """

    fn: Any
    args: tuple = (WS, X)
    argnums: Any = (0, 1)
    has_aux: bool = False
    exact: bool = True
    tolerance: float = 1e-6

    def gradient(self, fn):
        return jax.value_and_grad(fn, self.argnums, has_aux=self.has_aux)


CASES: dict[str, Case] = {}


def case(*args, name=None, **options):
    def add(fn):
        CASES[name or fn.__name__] = Case(fn, *args, **options)
        return fn

    return add


def layers(ws, x, activation=jnp.tanh):
    for w in ws:
        x = activation(x @ w)
    return jnp.sum(x**2)


for _activation in (jnp.tanh, jnp.sin, jax.nn.gelu, jax.nn.relu):
    _fn = functools.partial(layers, activation=_activation)
    # A cut goes through gelu, which reads its argument three times.
    CASES[f"layers {_activation.__name__}"] = Case(_fn, exact=_activation is not jax.nn.gelu)
# Values are larger than parameters, so that making them again pays.
CASES["wide batch"] = Case(layers, (WS, jnp.tile(X, (32, 1))))
for _dtype in (jnp.bfloat16, jnp.float16):
    CASES[f"layers {_dtype.__name__}"] = Case(
        lambda ws, x: layers(ws, x).astype(jnp.float32),
        ([w.astype(_dtype) for w in WS], X.astype(_dtype)),
        tolerance=2e-2,
    )


@case(exact=False)
def skips(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w) * 0.5 + jax.nn.softmax(x)
    return jnp.sum(x**2)


@case()
def custom_jvp(ws, x):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda x, t: (f(*x), 2 * jnp.cos(x[0]) * t[0]))
    return layers(ws, x, f)


@case()
def custom_vjp(ws, x):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def f(n, x):
        return n * jnp.sin(x)

    f.defvjp(lambda n, x: (n * jnp.sin(x), x), lambda n, x, g: (3 * n * jnp.cos(x) * g,))
    return layers(ws, x, functools.partial(f, 2.0))


@case()
def complexes(ws, x):
    z = lax.complex(x, ws[0])
    for w in ws[1:]:
        z = jnp.sin(z @ (w * (1 + 1j)))
    return jnp.sum(jnp.abs(z))


@case(exact=False)
def integers_and_booleans(ws, x):
    for w in ws:
        x = jnp.where(x > 0, jnp.sin(x @ w), x) + jax.nn.one_hot(jnp.argmax(x, axis=1), 4)
    return jnp.sum(x)


@case(exact=False)
def moving_data(ws, x):
    for w in ws[:2]:
        x = jnp.sort(x @ w, axis=0)[jnp.array([1, 0, 3, 2])]
        x = x.at[jnp.array([0, 2])].add(jnp.sin(x[1:3]))
    return jnp.sum(x * x)


@case(exact=False)
def branches(ws, x):
    for w in ws:
        x = lax.cond(x[0, 0] > 0, lambda x, w: jnp.sin(x @ w), lambda x, w: jnp.tanh(x), x, w)
    return jnp.sum(x)


@case(exact=False)
def while_loops(ws, x):
    for w in ws[:2]:
        x = jnp.tanh(x @ w)
        double = lambda c: (c[0] + 1, 2 * c[1])  # noqa: E731
        _, n = lax.while_loop(lambda c: c[0] < 5, double, (0, lax.stop_gradient(x)))
        x = x + n * x
    return jnp.sum(x)


def scanned(ws, x, *, length, reverse=False, unroll=1, xs=True):
    def body(c, s):
        c = jnp.tanh(c @ ws[0]) + (0.0 if s is None else s[None])
        return c, jnp.sin(c)[0]

    xs = jnp.arange(length * 4.0).reshape(length, 4) / 100 if xs else None
    c, ys = lax.scan(body, x, xs, length=length, reverse=reverse, unroll=unroll)
    return jnp.sum(c * ws[1]) + jnp.sum(ys**2)


SCANS = {
    "scan of one": dict(length=1),
    "scan of a prime": dict(length=11),
    "scan of twelve": dict(length=12),
    "scan without xs": dict(length=9, xs=False),
    "scan in reverse": dict(length=13, reverse=True),
    "scan unrolled": dict(length=12, unroll=5, reverse=True),
}
for _name, _options in SCANS.items():
    CASES[_name] = Case(functools.partial(scanned, **_options), exact=False)


@case(exact=False)
def nested_scans(ws, x):
    def outer(c, _):
        c, y = lax.scan(lambda c, _: (jnp.sin(c @ ws[0]), jnp.sum(c)), c, None, length=5)
        return c * jnp.tanh(c @ ws[1]), y

    c, y = lax.scan(outer, x, None, length=6)
    return jnp.sum(c) + jnp.sum(y)


def loop_with_keys(ws, x, key):
    """Keys among what is sliced, what goes around and what is stacked; turns left over."""

    def body(carry, key):
        x, own, i = carry
        own, sub = jax.random.split(own)
        x = jnp.tanh(jnp.sin(x @ ws[0])) * jax.random.bernoulli(key, 0.7, x.shape)
        return (x + 0.1 * jax.random.normal(sub, x.shape), own, i + 1), (x[0], sub, i)

    keys = jax.random.split(key, 11)
    (x, _, n), (ys, subs, _) = lax.scan(body, (x, key, 0), keys)
    return jnp.sum(x * n) + jnp.sum(ys), jax.vmap(jax.random.uniform)(subs)


CASES["loop with keys"] = Case(loop_with_keys, (WS, X, KEY), has_aux=True, exact=False)
CASES["loop with raw keys"] = Case(loop_with_keys, (WS, X, RAW_KEY), has_aux=True, exact=False)


@case(exact=False)
def what_the_user_wraps(ws, x):
    def blocks(ws, x):
        for i, w in enumerate(ws):
            x = jrc.mark(jnp.tanh(x @ w), f"layer_{i}")
        return x

    x = jrc.recompute_segments(blocks, ["layer_1"])(ws, x)
    x = jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ TABLE) @ TABLE))(x)
    x = jrc.recompute_op(jnp.sin)(x) @ TABLE
    x = jrc.keep_op(lambda x: jnp.tanh(jnp.sin(x)))(x)
    x = jrc.recompute(lambda x: jnp.tanh(jnp.sin(x) @ TABLE), x)
    return jnp.sum(x * x)


def dropped(ws, x, key):
    for i, w in enumerate(ws):
        x = jnp.tanh(x @ w)
        x = x * jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
    return jnp.sum(x), x


CASES["dropout"] = Case(dropped, (WS, X, KEY), has_aux=True)
CASES["dropout, raw key"] = Case(dropped, (WS, X, RAW_KEY), has_aux=True)


# 1 - tanh² of what is almost 1 has few digits: the last bit of a recomputed tanh shows.
@case(exact=False, tolerance=1e-3)
def running_products(ws, x):
    """The derivative of padding keeps a literal that has no hash."""
    for w in ws:
        x = lax.associative_scan(jnp.multiply, jnp.tanh(x @ w) + 1)
    return jnp.sum(x)


def kernel(x, w):
    """One row of blocks after another, as a fused kernel of a user is, with memory for its sums.

    Such a kernel's program has more than twice as many inputs as the kernel has operands.
    """

    def body(x, w, y, product, *_):
        product[...] = x[...] @ w[...]
        y[...] = jnp.tanh(product[...])

    rows, whole = pl.BlockSpec((2, 4), lambda i: (i, 0)), pl.BlockSpec((4, 4), lambda i: (0, 0))
    specs = {"in_specs": [rows, whole], "out_specs": rows, "out_shape": x}
    scratch = [pltpu.VMEM((2, 4), x.dtype)] * 3
    call = {"grid": (x.shape[0] // 2,), "scratch_shapes": scratch, "interpret": True}
    return pl.pallas_call(body, **call, **specs)(x, w)


def kernel_forward(x, w):
    y = kernel(x, w)
    return y, (x, w, y)


def kernel_backward(kept, g):
    x, w, y = kept
    g = g * (1 - y * y)
    return g @ w.T, x.T @ g


fused = jax.custom_vjp(kernel)
fused.defvjp(kernel_forward, kernel_backward)


@case(exact=False)
def kernels(ws, x):
    for w in ws:
        x = jnp.sin(fused(x, w))
    return jnp.sum(x**2)


@case(has_aux=True)
def aux_of_all_kinds(ws, x):
    return layers(ws, x), {"product": x @ ws[0], "count": jnp.int32(3), "given": ws[1]}


CASES["a closure"] = Case(lambda ws, x: layers(ws, x @ TABLE))
CASES["NumPy"] = Case(layers, ([np.asarray(w) for w in WS], np.asarray(X)))
CASES["numbers, None and dicts"] = Case(
    lambda p, n, none: layers(p["ws"], p["x"] * n), ({"ws": WS, "x": X}, 1.5, None), (0, 1)
)
CASES["the last argument"] = Case(layers, argnums=-1)
CASES["the other order"] = Case(layers, argnums=(1, 0))


def mesh_of(count):
    return Mesh(np.array(jax.devices()[:count]), ("data",))


@case(exact=False)
def sharded(ws, x):
    def mean(ws, x):
        x = lax.psum(jnp.sin(x @ ws[0]), "data") * x
        x, _ = lax.scan(lambda c, _: (jnp.tanh(c @ ws[1]), None), x, None, length=4)
        return lax.pmean(layers(ws[2:], x), "data")

    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    return jax.shard_map(mean, mesh=mesh_of(2), **specs)(ws, x * 2.0 + 1.0)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.LayerNorm(use_fast_variance=False)(nn.tanh(nn.Dense(8)(x)))
            x = nn.Dropout(0.5, deterministic=False)(x)
        return x


_normal = normal(1, 8, 4)
_variables = parameters(Linen().init, {"params": KEY, "dropout": KEY}, _normal)
CASES["flax linen"] = Case(
    lambda p, x, key: jnp.sum(Linen().apply(p, x, rngs={"dropout": key}) ** 2),
    (_variables, _normal, KEY),
    argnums=0,
    exact=False,
)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(3)])
        self.norm = nnx.BatchNorm(4, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(self.norm(layer(x)))
        return x


_graphdef, _params, _rest = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, ...)


@case((_params, _rest, _normal), argnums=0, has_aux=True, exact=False, name="flax nnx")
def split_module(params, rest, x):
    module = nnx.merge(_graphdef, params, rest, copy=True)
    loss = jnp.sum(module(x) ** 2)
    return loss, nnx.state(module, nnx.BatchStat)


def _gpt(scan, dropout):
    layers = 3 if scan else 1
    config = jrc.models.gpt.Config(16, layers, 2, 4, 4, dropout=dropout, scan=scan)
    tokens = integers(1, 16, 2, 5)
    loss = functools.partial(jrc.models.gpt.loss, config=config)
    return Case(
        loss, (parameters(jrc.models.gpt.init, KEY, config=config), tokens, KEY), 0, exact=False
    )


def _resnet():
    config = jrc.models.resnet.Config(depth=8, classes=4, width=4)
    params, state = parameters(jrc.models.resnet.init, KEY, config=config)
    batch = normal(2, 4, 8, 8, 3), jnp.arange(4)
    loss = functools.partial(jrc.models.resnet.loss, config=config)
    return Case(loss, (params, state, batch), 0, has_aux=True, exact=False, tolerance=1e-5)


def _mlp():
    config = jrc.models.mlp.Config((4, 8, 6, 4), activation="tanh")
    loss = functools.partial(jrc.models.mlp.loss, config=config)
    return Case(loss, (parameters(jrc.models.mlp.init, KEY, config=config), (X, jnp.arange(4))), 0)


CASES["mlp"] = _mlp()
CASES["resnet"] = _resnet()
CASES["gpt"] = _gpt(False, 0.3)
CASES["gpt, scanned"] = _gpt(True, 0.0)


@functools.cache
def problem_of_case(name):
    """The planning problem of a case."""
    case = CASES[name]
    return problem_of(case.fn, case.args, case.argnums, case.has_aux)


@functools.cache
def guess(name, option=0, compiled=False):
    """A plan of a case: the leanest, or another of the row."""
    problem = problem_of_case(name)
    return plan_as(problem, row_of(problem)[option], compiled=compiled)
