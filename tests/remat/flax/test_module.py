"""`jrc.recompute_module`: errors, and behaviour that both kinds of modules share."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jrc
from tests.processes import run_python
from tests.remat.measure import largest_error, rerun_operators


@pytest.mark.parametrize(
    "given, arrived",
    [
        (lambda x: x, "got function '<lambda>'"),
        (jnp.sin, "'sin'"),
        (dict, "got dict 'dict'"),
        (3, "got int. For"),
        (functools.partial(jnp.sum, axis=0), "'sum'"),
        (nnx.Linear(3, 3, rngs=nnx.Rngs(0)).__call__, "got method '__call__'"),
    ],
)
def test_only_modules_are_accepted(given, arrived):
    with pytest.raises(TypeError) as error:
        jrc.recompute_module(given)
    assert "jrc.recompute_module: module must be a flax linen or nnx module" in str(error.value)
    assert arrived in str(error.value) and "jrc.recompute(function, *args)" in str(error.value)


@pytest.mark.parametrize("module", [nn.Dense, nn.Dense(3), nnx.Linear])
def test_options_are_checked(module):
    with pytest.raises(ValueError, match="must be methods of .*got 'atend'.*It defines '"):
        jrc.recompute_module(module, methods=["atend"])
    with pytest.raises(TypeError, match="methods must be a sequence of names, got '__call__'"):
        jrc.recompute_module(module, methods="__call__")
    with pytest.raises(TypeError, match="methods must be a sequence of names, got 3"):
        jrc.recompute_module(module, methods=3)
    with pytest.raises(TypeError, match="static_argnums must be whole numbers, got 'train'"):
        jrc.recompute_module(module, static_argnums="train")
    with pytest.raises(ValueError, match="must be counted from 0 after self, got -1"):
        jrc.recompute_module(module, static_argnums=-1)


def test_a_missing_method_is_named():
    with pytest.raises(
        ValueError, match=r"methods of Embed, got 'atend' \(did you mean 'attend'\?\)"
    ):
        jrc.recompute_module(nn.Embed, methods=["atend"])


def test_rules_are_checked():
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="keep must be a rule or None, got str 'everything'"):
        jrc.recompute_module(layer, keep="everything")
    recomputed = jrc.recompute_module(layer, keep=jrc.Save("h"))
    with pytest.raises(ValueError, match=r"marks of `the module` .*\(none\), got 'h'"):
        recomputed(jnp.ones((2, 3)))


def test_flax_is_imported_on_demand():
    code = "import jrc, sys; assert not [m for m in sys.modules if m.split('.')[0] == 'flax']"
    run_python(code)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = jrc.mark(jnp.tanh(nn.Dense(3, use_bias=False)(x)), "h")
        return jnp.sin(nn.Dense(3, use_bias=False)(jrc.keep_op(jnp.sin)(h)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.two = nnx.Linear(3, 3, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = jrc.mark(jnp.tanh(self.one(x)), "h")
        return jnp.sin(self.two(jrc.keep_op(jnp.sin)(h)))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_rules_and_tags_act_inside_modules(kind):
    x = jnp.linspace(-0.5, 0.5, 6).reshape(2, 3)
    if kind == "linen":
        params = LinenBlock().init(jax.random.key(0), x)

        def loss(recomputed, params, x):
            return jnp.sum(recomputed(LinenBlock()).apply(params, x))
    else:
        graph, params = nnx.split(NnxBlock(nnx.Rngs(0)))

        def loss(recomputed, params, x):
            return jnp.sum(recomputed(nnx.merge(graph, params))(x))

    plain = functools.partial(loss, lambda module: module)
    tagged = functools.partial(loss, jrc.recompute_module)
    saved = functools.partial(loss, lambda m: jrc.recompute_module(m, keep=jrc.Save("h")))
    products = functools.partial(
        loss, lambda m: jrc.recompute_module(m, keep=jrc.SavePrimitives("dot_general"))
    )
    # The tag saves sin(h) and its cosine, which the second product reads. The first product is
    # recomputed for tanh, the second for the sine after it.
    counts = [
        rerun_operators(f, plain, params, x)["dot_general"] for f in (tagged, saved, products)
    ]
    assert counts == [2, 1, 0]
    grads = [jax.grad(f)(params, x) for f in (plain, tagged, saved, products)]
    assert max(largest_error(g, grads[0]) for g in grads[1:]) < 1e-6
