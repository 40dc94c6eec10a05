"""Models of `benchmarks.targets.largest_batch`: losses, shapes of arguments, ways by hand.

Parameters are float32 and are cast to bfloat16 in the loss. Losses are for a mesh with the axis
`fsdp`: examples are split over it, and so are parameters along their model's width; the ResNet's
lie on every device.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._models import llama
from benchmarks._models.by_hand import EACH, in_turn, regions
from benchmarks._models.model import array
from benchmarks._models.residual import resnet_loss
from benchmarks._private import cross_entropy, dense, layer_norm
from benchmarks.memory import _scale_policies as named
from jrc.models import gpt, resnet

PLAIN, FULL, DOTS = named.PLAIN, named.FULL, "dots_with_no_batch_dims_saveable"
MAXTEXT = tuple(named.SAVED)
AXIS = "fsdp"
_STACKS = ("blocks", "layers")
Loss = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model whose batch is not chosen yet.

    Attributes:
        title: Its name in tables.
        loss: The loss of its arguments, under the way `way`.
        shapes: From a batch the shapes of its arguments, parameters first, examples last.
        width: Parameters are split along an axis of this size; 0 splits none.
        ways: The ways by hand that there are, `PLAIN` first.
        step: Batches are multiples of this on each device.
        has_aux: Whether the loss returns more than a loss.
    """

    title: str
    loss: Loss
    shapes: Callable[[int], tuple[Any, ...]]
    width: int
    ways: tuple[str, ...] = (PLAIN, FULL, DOTS, *MAXTEXT)
    step: int = 1
    has_aux: bool = False

    def args(self, batch: int, mesh: Mesh) -> tuple[Any, ...]:
        """Return the shapes of the arguments with shardings; a batch is that of all devices."""
        *given, examples = self.shapes(batch)
        first, *others = given
        place = lambda spec, x: jax.ShapeDtypeStruct(  # noqa: E731
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        )
        first = jax.tree.map_with_path(
            lambda path, x: place(self._spec(path, x, mesh.size), x), first
        )
        others = jax.tree.map(functools.partial(place, P()), others)
        return first, *others, jax.tree.map(functools.partial(place, P(AXIS)), examples)

    def _spec(self, path: Any, x: Any, devices: int) -> P:
        """Return how a parameter is split: a matrix or a stack of them, along the width."""
        start = 1 if path[0].key in _STACKS else 0
        if x.ndim - start < 2 or not self.width or self.width % devices:
            return P()
        at = next((i for i in range(start, x.ndim) if x.shape[i] == self.width), None)
        return P() if at is None else P(*(AXIS if i == at else None for i in range(x.ndim)))


def _split(x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, P(AXIS))


def _looped(way: str) -> Callable[..., Any]:
    """Return the loop over blocks under a way, with examples split over devices."""

    def loop(body: Any, carry: Any, xs: Any) -> Any:
        one = lambda x, layer: (_split(body(x, layer)[0]), None)  # noqa: E731
        return named.POLICIES[way](one, _split(carry), xs)

    return loop


def _low(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def _gpt(title: str, toy: bool, step: int = 1, **sizes: int) -> Model:
    if toy:
        step = 1
        sizes = {"layers": 2, "heads": 2, "width": 128, "length": 128, "vocabulary": 512}
    config = gpt.Config(**{"vocabulary": 50304, "length": 1024} | sizes, scan=True)
    params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))

    def loss(params: Any, tokens: Any, way: str = PLAIN) -> Any:
        return named.loss(_low(params), tokens, config=config, loop=_looped(way))

    def shapes(batch: int) -> tuple[Any, ...]:
        return params, array(batch, config.length + 1, dtype=jnp.int32)

    return Model(title, loss, shapes, config.width, step=step)


def _llama(title: str, toy: bool, **sizes: Any) -> Model:
    made = llama.Sizes(2, 64, 4, 2, 128, 512, 64) if toy else llama.Sizes(**sizes)
    params = llama.shapes(made)

    def loss(params: Any, tokens: Any, way: str = PLAIN) -> Any:
        wrap = lambda block: block  # noqa: E731
        if way != PLAIN:
            policy = named.SAVED_BY[way]
            wrap = functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
        return llama.loss(params, tokens, sizes=made, wrap=wrap)

    def shapes(batch: int) -> tuple[Any, ...]:
        return params, array(batch, made.length + 1, dtype=jnp.int32)

    return Model(title, loss, shapes, made.width)


def _vit(title: str, toy: bool) -> Model:
    """Return ViT-L/16 for images of 224 x 224, with a class token.

    Source: Dosovitskiy et al., "An image is worth 16x16 words", arXiv 2010.11929, table 1.
    """
    size, patch, classes = (32, 8, 16) if toy else (224, 16, 1000)
    sizes = {"layers": 2, "heads": 2, "width": 64} if toy else {
        "layers": 24, "heads": 16, "width": 1024,
    }  # fmt: skip
    side = size // patch
    config = gpt.Config(1, length=side**2 + 1, **sizes, scan=True)
    made = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
    width = config.width
    linear = lambda given, out: {"w": array(given, out), "b": array(out)}  # noqa: E731
    params = {name: made[name] for name in ("blocks", "norm", "positions")}
    params |= {"patches": linear(3 * patch**2, width), "class": array(1, width)}
    params |= {"head": linear(width, classes)}

    def loss(params: Any, batch: Any, way: str = PLAIN) -> Any:
        params, (images, labels) = _low(params), batch
        x = images.reshape(-1, side, patch, side, patch, 3).swapaxes(2, 3)
        x = dense(params["patches"], x.reshape(-1, side**2, 3 * patch**2))
        first = jnp.broadcast_to(params["class"][None], (x.shape[0], 1, width))
        x = jnp.concatenate([first, x], axis=1) + params["positions"][None]
        step = lambda x, layer: (named.block(layer, x, config, causal=False), None)  # noqa: E731
        x, _ = _looped(way)(step, x, params["blocks"])
        logits = dense(params["head"], layer_norm(params["norm"], x[:, 0]))
        return cross_entropy(logits.astype(jnp.float32), labels)

    def shapes(batch: int) -> tuple[Any, ...]:
        images = array(batch, size, size, 3, dtype=jnp.bfloat16)
        return params, (images, array(batch, dtype=jnp.int32))

    return Model(title, loss, shapes, width, step=1 if toy else 8)


def _resnet(title: str, toy: bool) -> Model:
    """Return ResNet-50 for images of 224 x 224; a convolution is no dot, and has no name here."""
    config = resnet.Config(depth=8, width=4, classes=10) if toy else resnet.Config()
    size = 32 if toy else 224
    params, state = jax.eval_shape(functools.partial(resnet.init, config=config), jax.random.key(0))
    loss = functools.partial(resnet_loss, config=config)
    ways = {PLAIN: functools.partial(loss, through=in_turn)}
    ways[FULL] = regions(loss, sum(config.stages))[EACH]

    def shapes(batch: int) -> tuple[Any, ...]:
        images = array(batch, size, size, 3, dtype=jnp.bfloat16)
        return params, state, (images, array(batch, dtype=jnp.int32))

    def of_way(params: Any, state: Any, batch: Any, way: str = PLAIN) -> Any:
        return ways[way](params, state, batch)

    step = 1 if toy else 8
    return Model(title, of_way, shapes, 0, (PLAIN, FULL), step, has_aux=True)


_EIGHT = {
    "layers": 32, "width": 4096, "heads": 32, "groups": 8, "hidden": 14336, "tied": False,
}  # fmt: skip
MODELS: Mapping[str, Callable[[bool], Model]] = {
    "gpt2_124m": lambda toy: _gpt("GPT-2 124M", toy, 8, layers=12, heads=12, width=768),
    "gpt2_1.5b": lambda toy: _gpt("GPT-2 1.5B", toy, layers=48, heads=25, width=1600),
    "llama_1b": lambda toy: _llama("Llama 1B", toy),
    "llama_8b": lambda toy: _llama("Llama 8B", toy, **_EIGHT),
    "vit_l": lambda toy: _vit("ViT-L/16", toy),
    "resnet50": lambda toy: _resnet("ResNet-50", toy),
}
"""The models by name, from whether their sizes are those of a toy."""
