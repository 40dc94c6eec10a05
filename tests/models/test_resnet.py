"""ResNet: sizes, blocks against references, the normalisation's state, and what is re-run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import Mesh

import jrc
from jrc.models import resnet
from jrc.models._image import batch_norm, batch_norm_init
from tests.remat.measure import bit_equal, largest_error, rerun_operators, saved_bytes

SMALL = resnet.Config(depth=14, classes=10, channels=1, width=4, squeeze_excitation=2)


def shapes_of(config):
    return jax.eval_shape(lambda key: resnet.init(key, config), jax.random.key(0))


def unlike_init(tree):
    """The tree without the zeros and ones of `init`, which would hide what is left out."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + jnp.float32(rng.uniform(0.1, 0.3, x.shape)), tree)


def batch_of(config, size=8, count=8):
    x = jax.random.normal(jax.random.key(1), (count, size, size, config.channels))
    return x, jnp.arange(count) % config.classes


@pytest.mark.parametrize(
    ("depth", "classes", "size", "alone"),
    [
        (18, 1000, 11_689_512, (0, 1, 3, 5, 7)),
        (34, 1000, 21_797_672, (0, 1, 4, 8, 14)),
        (50, 1000, 25_557_032, (0, 1, 4, 8, 14)),
        (101, 1000, 44_549_160, (0, 1, 4, 8, 31)),
        (152, 1000, 60_192_808, (0, 1, 4, 12, 48)),
        (20, 10, 272_474, (0, 1, 4, 7)),
    ],
)
def test_parameters_and_mindspore_s_segments(depth, classes, size, alone):
    config = resnet.Config(depth=depth, classes=classes)
    params, state = shapes_of(config)
    assert sum(x.size for x in jax.tree.leaves(params)) == size
    norms = [x for path, x in jax.tree.leaves_with_path(params) if path[-1].key == "scale"]
    assert len(jax.tree.leaves(state)) == 2 * len(norms)
    setting = config.mindspore_segments
    assert setting == {"checkpoints": config.boundaries, "no_recompute_segments": alone}
    firsts = ["stem", *(f"stage_{i + 1}/block_0" for i in range(len(config.stages)))]
    assert [config.boundaries[i] for i in alone] == firsts


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (resnet.Config(depth=18, classes=3, width=2), (8, 8, 4, 2, 1)),
        (resnet.Config(depth=50, classes=3, width=2, stem="cifar"), (32, 32, 16, 8, 4)),
        (resnet.Config(depth=8, classes=3, width=2), (32, 32, 16, 8)),
        (resnet.Config(depth=8, classes=3, width=2, stem="imagenet"), (8, 8, 4, 2)),
    ],
)
def test_shapes_of_all_stems(config, sizes):
    """The strides, seen at the marks: stem, then the first block of every stage."""
    params, state = shapes_of(config)
    x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    apply = functools.partial(resnet.apply, config=config, train=True)
    jaxpr, (logits, after) = jax.make_jaxpr(apply, return_shape=True)(params, state, x)
    assert logits.shape == (2, 3)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    marks = {e.params["name"]: e.outvars[0].aval.shape for e in jaxpr.eqns if "leaf" in e.params}
    assert tuple(marks) == config.boundaries
    alone = config.mindspore_segments["no_recompute_segments"]
    widths = (config.width, *config.widths)
    assert [marks[config.boundaries[i]] for i in alone] == [
        (2, size, size, width) for size, width in zip(sizes, widths, strict=True)
    ]


class Reference(nn.Module):
    """A bottleneck with squeeze-and-excitation as linen writes it."""

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        conv = functools.partial(nn.Conv, use_bias=False)
        y = nn.relu(norm(name="norm_1")(conv(2, (1, 1), name="conv_1")(x)))
        y = conv(2, (3, 3), 2, padding=1, name="conv_2")(y)
        y = conv(8, (1, 1), name="conv_3")(nn.relu(norm(name="norm_2")(y)))
        y = norm(name="norm_3")(y)
        gate = nn.Dense(4, name="squeeze")(y.mean((1, 2)))
        gate = nn.sigmoid(nn.Dense(8, name="excite")(nn.relu(gate)))
        y = y * gate[:, None, None]
        x = norm(name="norm_shortcut")(conv(8, (1, 1), 2, name="shortcut")(x))
        return nn.relu(x + y)


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
def test_bottleneck_equals_flax(train):
    config = resnet.Config(depth=50, width=2, squeeze_excitation=2)
    all_params, all_state = resnet.init(jax.random.key(0), config)
    params, state = unlike_init((all_params["stage_1"]["block_0"], all_state["stage_1"]["block_0"]))
    x = jax.random.normal(jax.random.key(1), (4, 6, 6, 2)) * 3 + 1

    def linen(name, leaf):
        if name == "squeeze_excitation":
            return {k: {"kernel": v["w"], "bias": v["b"]} for k, v in leaf.items()}
        return {name: {"kernel": leaf} if hasattr(leaf, "shape") else leaf}

    theirs = {k: v for name, leaf in params.items() for k, v in linen(name, leaf).items()}
    stats = {name: {"mean": s["mean"], "var": s["variance"]} for name, s in state.items()}
    reference = functools.partial(Reference().apply, train=train, mutable="batch_stats")
    want, changed = jax.jit(reference)({"params": theirs, "batch_stats": stats}, x)
    block = jax.jit(functools.partial(resnet.block, stride=2, train=train))
    got, new = block(params, state, x)
    assert largest_error(got, want) < 1e-5
    stats = {name: {"mean": s["mean"], "var": s["variance"]} for name, s in new.items()}
    assert largest_error(stats, changed["batch_stats"]) < 1e-5
    assert bit_equal(new, state) != train


def test_basic_block_and_state_equal_the_formula():
    config = resnet.Config(depth=8, classes=3, width=2, channels=1)
    params, state = resnet.init(jax.random.key(0), config)
    params, state = unlike_init((params["stage_1"]["block_0"], state["stage_1"]["block_0"]))
    x = np.random.default_rng(0).normal(2.0, 3.0, (4, 5, 5, 2)).astype(np.float32)

    def conv(w, x):
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        out = np.zeros((*x.shape[:3], w.shape[-1]))
        for i in range(3):
            for j in range(3):
                out += padded[:, i : i + 5, j : j + 5] @ w[i, j]
        return out

    def norm(name, x):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        old, p = state[name], params[name]
        new = {"mean": 0.9 * old["mean"] + 0.1 * mean}
        new["variance"] = 0.9 * old["variance"] + 0.1 * variance
        return (x - mean) / np.sqrt(variance + 1e-5) * p["scale"] + p["bias"], new

    params, state = jax.tree.map(np.float64, (params, state))
    y, one = norm("norm_1", conv(params["conv_1"], x))
    y, two = norm("norm_2", conv(params["conv_2"], np.maximum(y, 0)))
    params, state = jax.tree.map(jnp.float32, (params, state))
    got, new = resnet.block(params, state, jnp.asarray(x), train=True)
    assert np.allclose(got, np.maximum(y + x, 0), atol=1e-5)
    want = {"norm_1": one, "norm_2": two}
    assert largest_error(new, jax.tree.map(jnp.float32, want)) < 1e-5


@pytest.mark.slow
def test_init_draws_each_kernel_with_its_own_numbers():
    params, _ = resnet.init(jax.random.key(0), resnet.Config(depth=8, classes=64, width=32))
    kernels = [x for x in jax.tree.leaves(params) if x.ndim > 1]
    starts = {tuple(np.ravel(x)[:3].tolist()) for x in kernels}
    assert len(starts) == len(kernels) == 10
    for x in kernels:
        # He et al.: variance 2 / inputs in front of a relu, and 1 / inputs in the head.
        want = (2 if x.ndim == 4 else 1) / np.prod(x.shape[:-1])
        assert abs(float(x.var()) / want - 1) < 6 * np.sqrt(2 / x.size)
        assert abs(float(x.mean())) < 5 * np.sqrt(want / x.size)


@pytest.mark.slow
def test_zero_init_leaves_the_shortcut():
    config = resnet.Config(depth=8, classes=3, width=2, zero_init=True)
    params, state = resnet.init(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (2, 4, 4, 2))
    block = params["stage_1"]["block_0"], state["stage_1"]["block_0"]
    assert jnp.array_equal(resnet.block(*block, x, train=True)[0], jax.nn.relu(x))


def test_half_precision_keeps_its_dtype_and_the_state_float32():
    params, state = batch_norm_init(2)
    x = 3 + jax.random.normal(jax.random.key(1), (4, 8, 8, 2), jnp.bfloat16)
    y, new = batch_norm(params, state, x, train=True)
    wide, want = batch_norm(params, state, x.astype(jnp.float32), train=True)
    assert y.dtype == jnp.bfloat16 and jnp.array_equal(y, wide.astype(jnp.bfloat16))
    assert bit_equal(new, want) and new["mean"].dtype == jnp.float32
    x = jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.bfloat16)
    logits, _ = jax.eval_shape(functools.partial(resnet.apply, config=SMALL), *shapes_of(SMALL), x)
    assert logits.dtype == jnp.float32


@pytest.mark.exhaustive(after=1)
@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("config", "convolutions"),
    [
        (SMALL, 3 * 2),
        (resnet.Config(depth=18, classes=4, width=2), 4 * 2),
        (resnet.Config(depth=50, classes=4, width=2, stem="cifar"), (2 + 3 + 5 + 2) * 3),
    ],
)
def test_mindspore_s_setting_re_runs_these_convolutions(config, convolutions):
    plain = functools.partial(resnet.loss, config=config)
    lean = jrc.recompute_segments(plain, **config.mindspore_segments)
    alone = [functools.partial(lambda f, *args: f(*args)[0], f) for f in (lean, plain)]
    more = rerun_operators(*alone, *shapes_of(config), batch_of(config))
    # One normalisation behind every convolution.
    assert more["conv_general_dilated"] == more["rsqrt"] == convolutions


@pytest.mark.exhaustive
@pytest.mark.slow
def test_mindspore_s_setting_changes_memory_only():
    args = (*resnet.init(jax.random.key(0), SMALL), batch_of(SMALL))
    plain = functools.partial(resnet.loss, config=SMALL)
    lean = jrc.recompute_segments(plain, **SMALL.mindspore_segments)
    one, two = (jax.jit(jax.value_and_grad(f, has_aux=True))(*args) for f in (lean, plain))
    assert largest_error(one, two) < 1e-6
    # At least the results of two convolutions of each re-run block are no longer kept.
    results = 2 * 8 * (8 * 8 * 4 + 4 * 4 * 8 + 2 * 2 * 16) * 4
    assert saved_bytes(lean, *args) <= saved_bytes(plain, *args) - results
    (_, (state, aux)), _ = one
    assert set(aux) == {"accuracy"}
    # Moved once, a tenth of the way, though the second block's forward pass ran twice.
    stem = jax.jit(functools.partial(resnet.stem, config=SMALL, train=True))
    block = jax.jit(functools.partial(resnet.block, train=True))
    x, _ = stem(args[0]["stem"], args[1]["stem"], args[2][0])
    for j in range(2):
        here = args[0]["stage_1"][f"block_{j}"], args[1]["stage_1"][f"block_{j}"]
        x, want = block(*here, x)
        assert largest_error(state["stage_1"][f"block_{j}"], want) < 1e-5


@pytest.mark.exhaustive
def test_all_blocks_re_run_are_bit_equal_where_nothing_is_fused():
    config = resnet.Config(depth=8, classes=2, channels=1, width=2)
    args = (*resnet.init(jax.random.key(0), config), batch_of(config, size=4, count=2))
    plain = functools.partial(resnet.loss, config=config)
    lean = jrc.recompute_segments(plain, config.boundaries)
    with jax.disable_jit():
        one, two = (jax.value_and_grad(f, has_aux=True)(*args) for f in (lean, plain))
    assert bit_equal(one, two)


def test_find_segments_counts_the_convolutions():
    loss = functools.partial(resnet.loss, config=SMALL)
    cut = jrc.find_segments(loss, SMALL.boundaries, *shapes_of(SMALL), batch_of(SMALL))
    assert [s.boundary for s in cut.segments] == [(name,) for name in SMALL.boundaries]
    count = [sum(name.startswith("conv_general") for name in s.rerun) for s in cut.segments]
    assert count == [1, 2, 2, 3, 2, 3, 2]


@pytest.mark.slow
def test_learns_in_the_train_step_and_evaluates_with_running_averages():
    config = resnet.Config(depth=8, classes=2, channels=1, width=4)
    params, model_state = resnet.init(jax.random.key(0), config)
    loss = functools.partial(resnet.loss, config=config)
    tx = optax.sgd(0.1, momentum=0.9)
    mesh = Mesh(jax.devices()[:2], ("data",))
    state = jrc.init_state(params, tx, jax.random.key(1), model_state=model_state, mesh=mesh)
    lean = jrc.recompute_segments(loss, config.boundaries)
    step = jrc.make_train_step(lean, tx, mesh=mesh)
    labels = jnp.arange(32) % 2
    noise = jax.random.normal(jax.random.key(2), (32, 4, 4, 1))
    x = noise + 2.0 * labels.reshape(32, 1, 1, 1)
    losses = []
    for _ in range(20):
        state, info = step(state, (x, labels))
        losses.append(float(info.loss))
    assert losses[-1] < 0.1 * losses[0] and float(info.aux["accuracy"]) == 1.0
    value, (same, aux) = loss(state.params, state.model_state, (x, labels), train=False)
    assert float(aux["accuracy"]) > 0.9 and bit_equal(same, state.model_state)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: resnet.Config(depth=21), "depth must be one of 18, 34, 50, 101, 152, or 6n \\+ 2"),
        (lambda: resnet.Config(depth=2), "got 2"),
        (lambda: resnet.Config(classes=0), "classes must be a whole number >= 1, got 0"),
        (lambda: resnet.Config(width=0), "width must be a whole number >= 1, got 0"),
        (
            lambda: resnet.Config(stem="mnist"),
            "stem must be one of 'imagenet', 'cifar'.*got 'mnist'",
        ),
        (
            lambda: resnet.Config(depth=8, width=4, squeeze_excitation=8),
            "squeeze_excitation must be at most 4.*got 8",
        ),
        (
            lambda: resnet.apply({}, {}, jnp.ones((2, 8, 8)), SMALL),
            r"of shape \(batch, height, width, 1\), got float32\[2, 8, 8\]",
        ),
        (
            lambda: resnet.apply({}, {}, jnp.ones((2, 8, 8, 1), jnp.uint8), SMALL),
            r"images must be floating.*got uint8.*Scale whole numbers to floats",
        ),
    ],
)
def test_errors(build, text):
    with pytest.raises(ValueError, match=text):
        build()
