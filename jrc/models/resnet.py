"""Residual networks for images, with batch normalisation whose state goes in and comes out.

    >>> import jax, jax.numpy as jnp
    >>> config = Config(depth=8, classes=10, width=4)
    >>> params, state = init(jax.random.key(0), config)
    >>> logits, state = apply(params, state, jnp.zeros((2, 8, 8, 3)), config, train=True)
    >>> logits.shape, config.boundaries
    ((2, 10), ('stem', 'stage_1/block_0', 'stage_2/block_0', 'stage_3/block_0'))

`loss` has the form with a model state that `jrc.make_train_step` takes. Every block but the first
of each stage is re-run, as MindSpore's ResNet sets it, by

    lean = jrc.recompute_segments(loss, **config.mindspore_segments)

The running averages come out of the forward pass, so they move once a step whatever is re-run.

Source: He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385, with the stride
of a bottleneck in its 3 x 3 convolution (often called version 1.5).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jrc._errors import public
from jrc._typing import AnyArray, Array, Float, Integer, PyTree, RandomKey
from jrc._validate import check_flag, whole_number
from jrc.models._check import (
    check_apply,
    check_array,
    check_config,
    check_init,
    check_labels,
    pair_of,
)
from jrc.models._image import (
    average,
    batch_norm,
    batch_norm_init,
    conv,
    conv_init,
    dense_init,
    draw,
    max_pool,
    squeeze_excitation,
    squeeze_excitation_init,
)
from jrc.models._layers import cross_entropy, dense
from jrc.remat import mark

# Blocks of each stage, and whether they are bottlenecks.
_DEPTHS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
_STEMS = ("imagenet", "cifar")
_EXPANSION = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """What a ResNet is.

    Attributes:
        depth: Layers with weights: 18, 34 (two 3 x 3 convolutions a block), 50, 101, 152
            (bottlenecks); any other 6n + 2 is the paper's three-stage net for small images, with n
            blocks of two convolutions a stage.
        classes: Number of classes.
        channels: Channels of the images; 1 for grey ones.
        width: Channels of the first stage, doubled by every later one; bottlenecks return four
            times as many. `None` is the paper's: 64, with three stages 16.
        stem: `"imagenet"`: 7 x 7 with stride 2, then 3 x 3 max-pooling with stride 2. `"cifar"`:
            3 x 3. `None` is the paper's: `"imagenet"`, with three stages `"cifar"`.
        squeeze_excitation: Reduction of a squeeze-and-excitation layer at the end of every
            block's branch, for instance 16; `None` is none.
        zero_init: Whether the last scale of every branch starts at 0 and not at 1, so that an
            untrained block returns the relu of its shortcut.
    """

    depth: int = 50
    classes: int = 1000
    channels: int = 3
    width: int | None = None
    stem: str | None = None
    squeeze_excitation: int | None = None
    zero_init: bool = False

    @public("jrc.models.resnet.Config")
    def __post_init__(self) -> None:
        """Check every field."""
        remedy = "Leave it out for the default."
        whole_number(self.depth, "depth", least=1, remedy=remedy)
        if self.depth not in _DEPTHS and (self.depth < 8 or self.depth % 6 != 2):
            raise ValueError(
                f"depth must be one of {', '.join(map(str, _DEPTHS))}, or 6n + 2 for "
                f"small images, got {self.depth}. Small ones are 8, 14, 20, …"
            )
        for field in ("classes", "channels", "width", "squeeze_excitation"):
            size = getattr(self, field)
            if size is not None or field in ("classes", "channels"):
                whole_number(size, field, least=1, remedy=remedy)
        check_flag(self.zero_init, "zero_init")
        if self.stem not in (None, *_STEMS):
            raise ValueError(
                f"stem must be one of {', '.join(map(repr, _STEMS))}, or None for the "
                f"paper's, got {self.stem!r}."
            )
        if (self.squeeze_excitation or 1) > (least := self.widths[0]):
            raise ValueError(
                f"squeeze_excitation must be at most {least}, the channels that the "
                f"first stage returns, got {self.squeeze_excitation}. Choose a smaller one, or a "
                "larger width."
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return _DEPTHS[self.depth][0] if self.depth in _DEPTHS else (self.depth // 6,) * 3

    @property
    def bottleneck(self) -> bool:
        """Whether a block is 1 x 1, 3 x 3, 1 x 1, or else two 3 x 3 convolutions."""
        return self.depth in _DEPTHS and _DEPTHS[self.depth][1]

    @property
    def widths(self) -> tuple[int, ...]:
        """The channels that each stage returns."""
        first = self.width or (64 if self.depth in _DEPTHS else 16)
        first *= _EXPANSION if self.bottleneck else 1
        return tuple(first * 2**i for i in range(len(self.stages)))

    @property
    def boundaries(self) -> tuple[str, ...]:
        """The marks: `stem`, then the blocks' results `stage_1/block_0`, `stage_1/block_1`, …."""
        return ("stem", *(name for stage in _blocks(self) for name in stage))

    @property
    def mindspore_segments(self) -> dict[str, Any]:
        """MindSpore's setting, as arguments of `jrc.recompute_segments`.

        Every block but the first of each stage is re-run; stem, first blocks and head are kept.
        """
        firsts = [stage[0] for stage in _blocks(self)]
        alone = (0, *(self.boundaries.index(name) for name in firsts))
        return {"checkpoints": self.boundaries, "no_recompute_segments": alone}


@public("jrc.models.resnet.init")
def init(key: RandomKey, config: Config) -> tuple[PyTree, PyTree]:
    """Return parameters and state, float32.

    Args:
        key: A random key.
        config: What to build.

    Returns:
        `(params, state)`. Parameters: `stem`, `stage_1` … with `block_0` … each, `head`. State:
        the same without `head`, with the running `mean` and `variance` of every normalisation.
    """
    check_init(key, config, Config)
    size, width = (7 if _stem(config) == "imagenet" else 3), config.widths[0]
    width //= _EXPANSION if config.bottleneck else 1
    norm, norm_state = batch_norm_init(width)
    params: dict[str, Any] = {
        "stem": {"conv": conv_init(size, config.channels, width), "norm": norm},
        "head": dense_init(config.widths[-1], config.classes),
    }
    state: dict[str, Any] = {"stem": {"norm": norm_state}}
    for stage, outputs in zip(_blocks(config), config.widths, strict=True):
        for name in stage:
            made = _init_block(config, width, outputs)
            _put(params, name, made[0])
            _put(state, name, made[1])
            width = outputs
    return draw(key, params), state


@public("jrc.models.resnet.apply")
def apply(
    params: PyTree,
    state: PyTree,
    x: Float[AnyArray, "batch height width channels"],
    config: Config,
    *,
    train: bool = False,
    key: RandomKey | None = None,
) -> tuple[Float[Array, "batch classes"], PyTree]:
    """Return logits, and the state after the batch.

    Args:
        params: Parameters from `init`.
        state: State from `init` or the step before.
        x: Images of any size, floating; convolutions run in their dtype.
        config: The same as for `init`.
        train: Normalise with the batch's statistics and move the running averages towards them;
            else normalise with the running averages, and return the state as it is.
        key: There is nothing random; taken for the sake of one form for all models.

    Returns:
        `(logits, state)`; logits are at least float32.

    Raises:
        TypeError: If `config` is none.
        ValueError: If `x` is not a floating array of four axes with `config.channels` channels, or
            the parameters were made for another model.
    """
    del key
    check_config(config, Config)
    _check_images(x, config)
    check_apply(params, config, Config, _names)
    x, new = stem(params["stem"], state["stem"], x, config, train=train)
    x, state_out = mark(x, "stem"), {"stem": new}
    for i, stage in enumerate(_blocks(config)):
        for j, name in enumerate(stage):
            stride = 2 if i > 0 and j == 0 else 1
            x, new = block(_get(params, name), _get(state, name), x, stride=stride, train=train)
            x = mark(x, name)
            _put(state_out, name, new)
    return dense(params["head"], average(x)), state_out


@public("jrc.models.resnet.loss")
def loss(
    params: PyTree,
    state: PyTree,
    batch: tuple[Float[AnyArray, "batch height width channels"], Integer[AnyArray, " batch"]],
    key: RandomKey | None = None,
    *,
    config: Config,
    train: bool = True,
) -> tuple[Float[Array, ""], tuple[PyTree, dict[str, Array]]]:
    """Return `(loss, (state, {"accuracy": …}))`: mean cross-entropy in nats of a batch."""
    x, labels = pair_of(batch)
    logits, state = apply(params, state, x, config, train=train, key=key)
    check_labels(labels, logits)
    accuracy = jnp.mean((jnp.argmax(logits, axis=-1) == labels).astype(logits.dtype))
    return cross_entropy(logits, labels), (state, {"accuracy": accuracy})


def stem(
    params: PyTree,
    state: PyTree,
    x: Float[AnyArray, "b h w channels"],
    config: Config,
    *,
    train: bool = False,
) -> tuple[Float[Array, "b new_h new_w c"], PyTree]:
    """Return the input of the first block, and the state of the stem's normalisation."""
    large = _stem(config) == "imagenet"
    x = conv(params["conv"], x, stride=2 if large else 1)
    x, norm = batch_norm(params["norm"], state["norm"], x, train)
    x = jax.nn.relu(x)
    return max_pool(x) if large else x, {"norm": norm}


def block(
    params: PyTree,
    state: PyTree,
    x: Float[AnyArray, "b h w c"],
    *,
    stride: int = 1,
    train: bool = False,
) -> tuple[Float[Array, "b -(-h//{stride}) -(-w//{stride}) d"], PyTree]:
    """Run one block, relu(branch + shortcut), with `params["stage_i"]["block_j"]`."""
    count = 3 if "conv_3" in params else 2
    strided = 2 if count == 3 else 1
    y, new = x, {}
    for i in range(1, count + 1):
        y = conv(params[f"conv_{i}"], y, stride if i == strided else 1)
        norm = f"norm_{i}"
        y, new[norm] = batch_norm(params[norm], state[norm], y, train)
        y = y if i == count else jax.nn.relu(y)
    if "squeeze_excitation" in params:
        y = squeeze_excitation(params["squeeze_excitation"], y)
    if "shortcut" in params:
        x = conv(params["shortcut"], x, stride)
        norm = "norm_shortcut"
        x, new[norm] = batch_norm(params[norm], state[norm], x, train)
    return jax.nn.relu(y + x), new


def _init_block(config: Config, inputs: int, outputs: int) -> tuple[Any, Any]:
    """Return parameters and state of a block; its shortcut may be a 1 x 1 convolution."""
    inner = outputs // _EXPANSION if config.bottleneck else outputs
    widths = (inputs, inner, inner, outputs) if config.bottleneck else (inputs, inner, outputs)
    sizes = (1, 3, 1) if config.bottleneck else (3, 3)
    params, state = {}, {}
    for i, size in enumerate(sizes):
        last = i + 1 == len(sizes)
        scale = 0.0 if last and config.zero_init else 1.0
        params[f"conv_{i + 1}"] = conv_init(size, widths[i], widths[i + 1])
        name = f"norm_{i + 1}"
        params[name], state[name] = batch_norm_init(widths[i + 1], scale)
    if inputs != outputs:
        params["shortcut"] = conv_init(1, inputs, outputs)
        params["norm_shortcut"], state["norm_shortcut"] = batch_norm_init(outputs)
    if config.squeeze_excitation:
        reduction = config.squeeze_excitation
        params["squeeze_excitation"] = squeeze_excitation_init(outputs, reduction)
    return params, state


def _blocks(config: Config) -> list[list[str]]:
    """Return the names of the blocks of each stage."""
    counts = enumerate(config.stages, 1)
    return [[f"stage_{i}/block_{j}" for j in range(count)] for i, count in counts]


def _names(config: Config) -> tuple[str, ...]:
    """Return the names of the parameters that `init` makes."""
    return ("stem", *(f"stage_{i + 1}" for i in range(len(config.stages))), "head")


def _stem(config: Config) -> str:
    return config.stem or ("imagenet" if config.depth in _DEPTHS else "cifar")


def _get(tree: Any, name: str) -> Any:
    stage, block = name.split("/")
    return tree[stage][block]


def _put(tree: Any, name: str, value: Any) -> None:
    stage, block = name.split("/")
    tree.setdefault(stage, {})[block] = value


def _check_images(x: Any, config: Config) -> None:
    rule = f"images must be floating, of shape (batch, height, width, {config.channels})"
    remedy = (
        "Scale whole numbers to floats, move the channels last, or make the model with as many "
        "channels."
    )
    check_array(x, jnp.floating, (None, None, None, config.channels), rule, remedy)
