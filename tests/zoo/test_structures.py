"""Modules of packages passed whole, to every function that takes a loss or a block."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jrc
from tests.remat.measure import largest_error, operators

eqx = pytest.importorskip("equinox", reason="the extra `zoo` is not installed")

from tests.zoo.equinox_models import eqx_batchnorm, eqx_mlp, eqx_vit  # noqa: E402
from tests.zoo.program import gradient_error  # noqa: E402

MODELS = {fn.__name__: fn for fn in (eqx_mlp, eqx_vit, eqx_batchnorm)}


@pytest.fixture(params=MODELS)
def program(request):
    with jax.numpy_rank_promotion("allow"):
        yield MODELS[request.param](True)


def gradients(program, fn):
    """As a user of equinox takes them, under `eqx.filter_jit`."""
    run = eqx.filter_jit(eqx.filter_value_and_grad(fn, has_aux=program.has_aux))
    value, grads = run(*program.args)
    return (value[0] if program.has_aux else value), eqx.filter(grads, eqx.is_array)


@pytest.mark.exhaustive
def test_a_module_passed_whole(program):
    """Functions, flags and integers among the leaves reach the module as they are."""
    loss, args = program.loss, program.args
    report = jrc.explain(loss, *args, has_aux=program.has_aux)
    plan = jrc.plan(loss, *args, budget=0.0, has_aux=program.has_aux, verify=False)
    assert report.saved and plan.reruns
    assert gradient_error(gradients(program, plan.apply(loss)), gradients(program, loss)) < 1e-5
    assert jrc.Plan.from_json(plan.to_json()) == plan


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_module_in_the_largest_batch():
    model, x, key = eqx_mlp(True).args

    def loss(model, x, key):
        for layer in model:
            x = jax.vmap(layer)(x, jax.random.split(key, x.shape[0]))
        return jnp.mean(x**2)

    make = lambda n: (model, jnp.ones((64 * n, x.shape[1])), key)  # noqa: E731
    found = jrc.largest_batch(make, loss, "160KiB", most=2)
    assert 0 < found.plain < found.recomputed


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_module_recomputed_as_one_segment(use_reentrant):
    """The module is the function itself, or an argument of one."""
    model, x, key = eqx_mlp(True).args
    keys = jax.random.split(key, x.shape[0])
    recompute = functools.partial(jrc.recompute, use_reentrant=use_reentrant)

    def plain(layer, x):
        return jnp.sum(jax.vmap(layer)(x, keys) ** 2)

    def as_argument(layer, x):
        return recompute(plain, layer, x)

    def as_function(layer, x):
        block = eqx.nn.Lambda(lambda x: jax.vmap(layer)(x, keys))
        return jnp.sum(recompute(block, x) ** 2)

    grads = [eqx.filter_grad(fn)(model[0], x) for fn in (plain, as_argument, as_function)]
    plain_grads, *others = (eqx.filter(each, eqx.is_array) for each in grads)
    for other in others:
        assert largest_error(other, plain_grads) < 1e-6


def test_segments_of_a_module():
    model, x, key = eqx_mlp(True).args

    def loss(model, x):
        for i, layer in enumerate(model):
            keys = jax.random.split(jax.random.fold_in(key, i), x.shape[0])
            x = jrc.mark(jax.vmap(layer)(x, keys), f"layer_{i}")
        return jnp.sum(x**2)

    segmented = jrc.recompute_segments(loss, ["layer_0", "layer_1", "layer_2"])
    grads = [eqx.filter(eqx.filter_grad(f)(model, x), eqx.is_array) for f in (segmented, loss)]
    assert largest_error(*grads) < 1e-6
    dynamic, static = eqx.partition(model, eqx.is_inexact_array)
    counts = [
        operators(jax.grad(lambda d, f=f: f(eqx.combine(d, static), x)), dynamic)["dot_general"]
        for f in (segmented, loss)
    ]
    assert counts[0] == counts[1] + 3


@pytest.mark.slow
def test_a_loss_that_is_a_module():
    """A callable module with arrays of its own; and one bound by `functools.partial`."""
    model, x, key = eqx_mlp(True).args
    keys = jax.random.split(key, x.shape[0])

    class Loss(eqx.Module):
        target: jax.Array

        def __call__(self, model, x, *, keys):
            for layer in model:
                x = jax.vmap(layer)(x, keys)
            return jnp.mean((x - self.target) ** 2)

    loss = functools.partial(Loss(x), keys=keys)
    plan = jrc.plan(loss, model, x, budget=0.0, verify=False)
    grads = [eqx.filter_grad(f)(model, x) for f in (plan.apply(loss), loss)]
    assert plan.reruns
    assert largest_error(*(eqx.filter(each, eqx.is_array) for each in grads)) < 1e-6
    assert jrc.explain(loss, model, x).saved


@pytest.mark.slow
def test_a_transform_of_haiku_with_keys_and_marks_inside():
    hk = pytest.importorskip("haiku")

    def forward(x):
        for i in range(4):
            x = jrc.mark(jax.nn.gelu(hk.Linear(x.shape[-1])(x)), f"layer_{i}")
            x = hk.dropout(hk.next_rng_key(), 0.1, x)
        return jnp.mean(x**2)

    net, x = hk.transform(forward), jnp.linspace(-1.0, 1.0, 4096).reshape(256, 16)
    key = jax.random.key(1)
    with jax.numpy_rank_promotion("allow"):
        params = net.init(key, x)
        plan = jrc.plan(net.apply, params, key, x, budget=0.0, verify=False)
        fns = [plan.apply(net.apply), jrc.recompute_segments(net.apply, ["layer_0", "layer_2"])]
        fns.append(functools.partial(jrc.recompute, net.apply))
        plain = jax.grad(net.apply)(params, key, x)
        assert plan.reruns and jrc.explain(net.apply, params, key, x).saved
        for fn in fns:
            assert largest_error(jax.grad(fn)(params, key, x), plain) < 1e-6
