"""The models of `benchmarks/plan.py`: a loss, the shapes of its arguments, and the ways by hand.

Every loss is a plain function without marks that is differentiated for its first argument. Its
references are the same loss recomputed as a user does it without jrc (`plan_references.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from benchmarks._models.by_hand import in_turn, loops, regions
from benchmarks._models.flax_modules import Mixer, VisionTransformer
from jrc.models import gpt, resnet
from jrc.models._image import conv
from jrc.models._layers import cross_entropy, dense, layer_norm


@dataclasses.dataclass(frozen=True)
class Model:
    """One model at one size.

    Attributes:
        title: What it is, for a table.
        fn: Loss, or with `has_aux` loss and whatever else, of `args`.
        args: Shapes and dtypes of the arguments, parameters first.
        references: The same function recomputed in the ways that users write by hand.
        has_aux: Whether `fn` returns more than a loss.
        scanned: Whether the layers are one loop.
    """

    title: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    references: Mapping[str, Callable[..., Any]]
    has_aux: bool = False
    scanned: bool = False


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def drawn(args: Any, seed: int = 0) -> Any:
    """Small arrays in the place of shapes; every class and token number is 0 or 1."""
    draw = np.random.default_rng(seed)

    def of(leaf: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(0.1 * draw.standard_normal(leaf.shape), leaf.dtype)
        return jnp.asarray(draw.integers(0, 2, leaf.shape), leaf.dtype)

    return jax.tree.map(of, args)


# --- transformers -------------------------------------------------------------------------------


def _gpt_loss(params: Any, batch: Any, key: Any = None, *, config: Any, through: Any) -> Any:
    """As `gpt.loss`, with the way through the blocks in the reader's hand."""
    if config.scan:
        return gpt.loss(params, batch, key, config=config, loop=through)
    keys = [None] * (config.layers + 1) if key is None else jax.random.split(key, config.layers + 1)
    x = gpt.embed(params, batch[:, :-1], config, key=keys[0])
    blocks = [
        functools.partial(
            lambda params, key, x: gpt.block(params, x, config, key=key), params[name], block_key
        )
        for name, block_key in zip(config.boundaries, keys[1:], strict=True)
    ]
    x = through(SimpleNamespace(blocks=blocks), x)
    return cross_entropy(gpt.unembed(params, x), batch[:, 1:])


def _gpt(title: str, toy: bool, scan: bool = False, dropout: float = 0.0) -> Model:
    sizes = {"layers": 12, "heads": 8, "width": 256, "length": 512}
    if toy:
        sizes = {"layers": 4 if scan else 3, "heads": 2, "width": 16, "length": 16}
    config = gpt.Config(**sizes, scan=scan, dropout=dropout)
    params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
    args = (params, array(2 if toy else 4, config.length + 1, dtype=jnp.int32))
    if dropout:
        args += (jax.eval_shape(jax.random.key, 0),)
    loss = functools.partial(_gpt_loss, config=config)
    ways = (loops if scan else regions)(loss, config.layers)
    plain = functools.partial(loss, through=jax.lax.scan if scan else in_turn)
    return Model(title, plain, args, ways, scanned=scan)


# --- images -------------------------------------------------------------------------------------


def _resnet_loss(params: Any, state: Any, batch: Any, *, config: Any, through: Any) -> Any:
    x, labels = batch
    x, new = resnet.stem(params["stem"], state["stem"], x, config, train=True)
    names = [name.split("/") for name in config.boundaries[1:]]

    def run(stage: str, name: str, carry: Any) -> Any:
        x, new = carry
        stride = 2 if stage != "stage_1" and name == "block_0" else 1
        block = functools.partial(resnet.block, stride=stride, train=True)
        x, found = block(params[stage][name], state[stage][name], x)
        return x, new | {f"{stage}/{name}": found}

    blocks = [functools.partial(run, *name) for name in names]
    x, new = through(SimpleNamespace(blocks=blocks), (x, {"stem": new}))
    logits = dense(params["head"], jnp.mean(x, axis=(1, 2)))
    return cross_entropy(logits, labels), new


def _resnet(title: str, toy: bool) -> Model:
    config = resnet.Config(
        depth=8 if toy else 50, classes=10, stem="cifar", width=4 if toy else None
    )
    params, state = jax.eval_shape(functools.partial(resnet.init, config=config), jax.random.key(0))
    size, batch = (8, 2) if toy else (32, 64)
    images = (array(batch, size, size, 3), array(batch, dtype=jnp.int32))
    loss = functools.partial(_resnet_loss, config=config)
    ways = regions(loss, sum(config.stages))
    plain = functools.partial(loss, through=in_turn)
    return Model(title, plain, (params, state, images), ways, has_aux=True)


def _twice(params: Sequence[Any], x: Any) -> Any:
    """Two convolutions, each normalised over the channels and followed by a silu."""
    for layer in params:
        x = jax.nn.silu(layer_norm(layer["norm"], conv(layer["conv"], x)))
    return x


def _down(params: Any, first: bool, carry: Any) -> Any:
    x, skips = carry
    if not first:
        b, h, w, c = x.shape
        x = jnp.mean(x.reshape(b, h // 2, 2, w // 2, 2, c), axis=(2, 4))
    x = _twice(params, x)
    return x, (*skips, x)


def _up(params: Any, carry: Any) -> Any:
    x, (*skips, skip) = carry
    x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
    return _twice(params, jnp.concatenate([x, skip], axis=-1)), tuple(skips)


def _bottom(params: Any, carry: Any) -> Any:
    x, skips = _down(params, False, carry)
    return x, skips[:-1]


def _unet_loss(params: Any, batch: Any, *, through: Any) -> Any:
    """Mean squared error of an image from a noisy one."""
    noisy, clean = batch
    blocks = [
        functools.partial(_down, layers, i == 0) for i, layers in enumerate(params["down"][:-1])
    ]
    blocks += [functools.partial(_bottom, params["down"][-1])]
    blocks += [functools.partial(_up, layers) for layers in params["up"]]
    x, _ = through(SimpleNamespace(blocks=blocks), (noisy, ()))
    return jnp.mean((conv(params["head"], x) - clean) ** 2)


def _unet(title: str, toy: bool) -> Model:
    widths = [8, 8, 16] if toy else [32, 64, 128, 256]
    size, batch = (8, 2) if toy else (64, 16)

    def two(inputs: int, outputs: int) -> list[Any]:
        norm = {"scale": array(outputs), "bias": array(outputs)}
        return [{"conv": array(3, 3, n, outputs), "norm": norm} for n in (inputs, outputs)]

    params = {
        "down": [two(a, b) for a, b in zip([3, *widths], widths, strict=False)],
        "up": [two(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)],
        "head": array(1, 1, widths[0], 3),
    }
    images = (array(batch, size, size, 3),) * 2
    plain = functools.partial(_unet_loss, through=in_turn)
    return Model(title, plain, (params, images), regions(_unet_loss, 2 * len(widths) - 1))


# --- loops and dense layers ---------------------------------------------------------------------


def _lstm_loss(params: Any, batch: Any, *, through: Any) -> Any:
    """Cross-entropy of every token from those before it; a batch is (steps + 1, batch)."""

    def step(carry: Any, token: Any) -> Any:
        h, c = carry
        gates = dense(params["cell"], jnp.concatenate([params["tokens"][token], h], axis=-1))
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((batch.shape[1], params["tokens"].shape[1]))
    _, h = through(step, (zeros, zeros), batch[:-1])
    return cross_entropy(dense(params["head"], h), batch[1:])


def _lstm(title: str, toy: bool) -> Model:
    steps, batch, width, vocabulary = (9, 2, 8, 16) if toy else (256, 64, 512, 256)
    params = {
        "tokens": array(vocabulary, width),
        "cell": {"w": array(2 * width, 4 * width), "b": array(4 * width)},
        "head": {"w": array(width, vocabulary), "b": array(vocabulary)},
    }
    args = (params, array(steps + 1, batch, dtype=jnp.int32))
    plain = functools.partial(_lstm_loss, through=jax.lax.scan)
    return Model(title, plain, args, loops(_lstm_loss, steps), scanned=True)


def _mlp_loss(params: Any, batch: Any, *, through: Any) -> Any:
    x, y = batch
    blocks = [
        functools.partial(lambda layer, act, x: act(dense(layer, x)), layer, act)
        for layer, act in zip(params, [jax.nn.gelu, jnp.tanh] * len(params), strict=False)
    ]
    return jnp.mean((through(SimpleNamespace(blocks=blocks), x) - y) ** 2)


def _mlp(title: str, toy: bool) -> Model:
    widths = [256, 4096, 64, 2048, 512, 4096, 128, 1024, 4096, 256, 2048, 64, 1024]
    batch = 2048
    if toy:
        widths, batch = [max(n // 64, 2) for n in widths[:7]], 16
    params = [{"w": array(a, b), "b": array(b)} for a, b in zip(widths, widths[1:], strict=False)]
    data = (array(batch, widths[0]), array(batch, widths[-1]))
    plain = functools.partial(_mlp_loss, through=in_turn)
    return Model(title, plain, (params, data), regions(_mlp_loss, len(params)))


# --- flax ---------------------------------------------------------------------------------------


def _images(toy: bool, batch: int) -> tuple[Any, Any]:
    size = 8 if toy else 64
    return array(batch, size, size, 3), array(batch, dtype=jnp.int32)


def _linen(title: str, toy: bool) -> Model:
    sizes = {"layers": 3, "width": 8, "heads": 2} if toy else {}
    batch = _images(toy, 2 if toy else 16)
    params = jax.eval_shape(VisionTransformer(**sizes).init, jax.random.key(0), batch[0])

    def loss(params: Any, batch: Any, *, through: Any) -> Any:
        logits = VisionTransformer(**sizes, through=through).apply(params, batch[0])
        return cross_entropy(logits, batch[1])

    ways = regions(loss, VisionTransformer(**sizes).layers, nn.remat)
    return Model(title, functools.partial(loss, through=in_turn), (params, batch), ways)


def _nnx(title: str, toy: bool) -> Model:
    sizes = {"layers": 3, "tokens": 4, "width": 8} if toy else {}
    batch = _images(toy, 2 if toy else 32)
    module = nnx.eval_shape(lambda: Mixer(**sizes, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(module)

    def loss(params: Any, batch: Any, *, through: Any) -> Any:
        logits = nnx.merge(graph, params)(batch[0], through=through)
        return cross_entropy(logits, batch[1])

    ways = regions(loss, len(module.blocks), nnx.remat)
    return Model(title, functools.partial(loss, through=in_turn), (params, batch), ways)


def _named(build: Callable[..., Model], title: str, **options: Any) -> Callable[[bool], Model]:
    return lambda toy: build(title, toy, **options)


MODELS: Mapping[str, Callable[[bool], Model]] = {
    "gpt": _named(_gpt, "GPT, unrolled"),
    "gpt_scanned": _named(_gpt, "GPT, scanned", scan=True),
    "gpt_dropout": _named(_gpt, "GPT with dropout", dropout=0.1),
    "resnet": _named(_resnet, "ResNet-50"),
    "unet": _named(_unet, "U-Net"),
    "lstm": _named(_lstm, "LSTM, 256 steps"),
    "mlp": _named(_mlp, "uneven MLP"),
    "linen": _named(_linen, "linen ViT"),
    "nnx": _named(_nnx, "nnx MLP-Mixer"),
}
"""Each builds its model at full size, or with `True` tiny."""
