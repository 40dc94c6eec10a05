"""Checks of what the models are called with: configurations, parameters, inputs and labels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jrc._errors import listed
from jrc._rng import check_key
from jrc._tree import is_number, is_traced


def check_config(config: Any, kind: type) -> None:
    """Refuse a configuration that is not this model's."""
    if not isinstance(config, kind):
        name = f"{kind.__module__}.Config"
        raise TypeError(f"config must be a {name}, got {type(config).__name__}. Write {name}().")


def check_init(key: Any, config: Any, kind: type) -> None:
    """Refuse a configuration or a key from which no parameters can be drawn."""
    check_config(config, kind)
    check_key(key)


def check_apply(
    params: Any, config: Any, kind: type, names_of: Callable[[Any], Sequence[str]]
) -> None:
    """Refuse parameters without the names that `names_of` gives for this configuration."""
    check_config(config, kind)
    names = names_of(config)
    missing = [name for name in names if not isinstance(params, Mapping) or name not in params]
    if missing:
        found = type(params).__name__
        found = f"a {found} with {listed(params)}" if isinstance(params, Mapping) else found
        raise ValueError(
            "params must be those that init makes for this config, with "
            f"{listed(names)}, got {found}. Write params = {kind.__module__}.init(key, "
            "config)."
        )


def check_array(x: Any, kind: Any, axes: Sequence[int | None], rule: str, remedy: str) -> None:
    """Refuse anything but an array of a kind of dtype with these axes; None is any length."""
    array = is_number(x) or is_traced(x)
    shape = jnp.shape(x) if array else ()
    fits = len(shape) == len(axes) and all(n in (None, m) for n, m in zip(axes, shape, strict=True))
    if not (array and fits and jnp.issubdtype(jnp.result_type(x), kind)):
        arrived = f"{jnp.result_type(x)}{list(shape)}" if array else type(x).__name__
        raise ValueError(f"{rule}, got {arrived}. {remedy}")


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return inputs and labels of a batch."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ValueError(
            f"batch must be a pair of inputs and labels, got {type(batch).__name__}{size}. "
            "Write batch=(x, labels)."
        )
    return batch[0], batch[1]


def check_labels(labels: Any, logits: Any) -> None:
    """Refuse labels that are not one class for each example."""
    rule = "labels must be integers, one for each example, of shape (batch,)"
    remedy = "Number the classes from 0."
    check_array(labels, jnp.integer, logits.shape[:1], rule, remedy)
