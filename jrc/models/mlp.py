"""A multi-layer perceptron for classification: by default the net of Paddle's recompute sample.

>>> import jax, jax.numpy as jnp
>>> params = init(jax.random.key(0), Config())
>>> apply(params, jnp.ones((4, 32)), Config()).shape
(4, 2)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrc._errors import public
from jrc._typing import AnyArray, Array, Float, Integer, Num, PyTree, RandomKey
from jrc._validate import is_whole, one_of
from jrc.models._check import check_apply, check_array, check_init, check_labels, pair_of
from jrc.models._layers import cross_entropy, dense, dense_init
from jrc.remat import mark

_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda x: x,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of an MLP.

    Attributes:
        sizes: Width of the input, of every hidden layer, and the number of classes.
        activation: Between layers: `"identity"`, `"relu"`, `"gelu"` or `"tanh"`.
    """

    sizes: tuple[int, ...] = (32, 128, 2)
    activation: str = "identity"

    @public("jrc.models.mlp.Config")
    def __post_init__(self) -> None:
        """Check both fields."""
        several = isinstance(self.sizes, tuple | list)
        whole = several and all(is_whole(size) and size > 0 for size in self.sizes)
        if not whole or len(self.sizes) < 2:
            raise ValueError(
                "sizes must have an input and an output width at least, all whole numbers "
                f">= 1, got {self.sizes!r}. The default is (32, 128, 2)."
            )
        one_of(self.activation, "activation", _ACTIVATIONS)

    @property
    def boundaries(self) -> tuple[str, ...]:
        """The marks in program order: `fc_1`, `fc_2`, …, `pred`."""
        return (*(f"fc_{i + 1}" for i in range(len(self.sizes) - 2)), "pred")


@public("jrc.models.mlp.init")
def init(key: RandomKey, config: Config) -> PyTree:
    """Return parameters `{"fc_1": {"w", "b"}, …, "pred": {"w", "b"}}`, float32."""
    check_init(key, config, Config)
    names = config.boundaries
    keys = jax.random.split(key, len(names))
    pairs = zip(config.sizes, config.sizes[1:], strict=False)
    return {
        name: dense_init(k, inputs, outputs)
        for name, k, (inputs, outputs) in zip(names, keys, pairs, strict=True)
    }


@public("jrc.models.mlp.apply")
def apply(
    params: PyTree,
    x: Num[AnyArray, "batch features"],
    config: Config,
    *,
    key: RandomKey | None = None,
) -> Float[Array, "batch classes"]:
    """Return logits; every layer's result is marked with its name. `key` is not used."""
    del key
    check_apply(params, config, Config, lambda config: config.boundaries)
    rule = f"x must be numbers, of shape (batch, {config.sizes[0]})"
    remedy = "Flatten the examples, or make the model with sizes that begin with their width."
    check_array(x, jnp.number, (None, config.sizes[0]), rule, remedy)
    activation = _ACTIVATIONS[config.activation]
    for name in config.boundaries:
        x = mark(dense(params[name], x), name)
        x = x if name == "pred" else activation(x)
    return x


@public("jrc.models.mlp.loss")
def loss(
    params: PyTree,
    batch: tuple[Num[AnyArray, "batch features"], Integer[AnyArray, " batch"]],
    key: RandomKey | None = None,
    *,
    config: Config,
) -> Float[Array, ""]:
    """Return the mean softmax cross-entropy, nats, of a batch `(x, labels)`."""
    x, labels = pair_of(batch)
    logits = apply(params, x, config, key=key)
    check_labels(labels, logits)
    return cross_entropy(logits, labels)
