"""What the models are given, checked: sizes, configurations, parameters, inputs and labels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jrc._errors import listed
from jrc._rng import check_key
from jrc._tree import is_number, is_traced


def check_size(value: Any, name: str, who: str) -> None:
    """A whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(
            f"{who}: {name} is a whole number; got {value!r}. Leave it out for the usual."
        )
    if value < 1:
        raise ValueError(f"{who}: {name} is at least 1; got {value}. Leave it out for the usual.")


def check_config(config: Any, kind: type, who: str) -> None:
    """A configuration of this very model."""
    if not isinstance(config, kind):
        name = f"{who.rpartition('.')[0]}.Config"
        raise TypeError(f"{who}: config is a {name}; got {type(config).__name__}. Write {name}().")


def check_init(key: Any, config: Any, kind: type, who: str) -> None:
    """What parameters are drawn from."""
    check_config(config, kind, who)
    check_key(key, who)


def check_apply(
    params: Any, config: Any, kind: type, names_of: Callable[[Any], Sequence[str]], who: str
) -> None:
    """Parameters that were made for this configuration, from which `names_of` gives their names."""
    check_config(config, kind, who)
    names = names_of(config)
    missing = [name for name in names if not isinstance(params, Mapping) or name not in params]
    if missing:
        found = type(params).__name__
        found = f"a {found} with {listed(params)}" if isinstance(params, Mapping) else found
        raise ValueError(
            f"{who}: the parameters are those that init makes for this config, with "
            f"{listed(names)}; got {found}. Write params = {who.rpartition('.')[0]}.init(key, "
            "config)."
        )


def check_array(
    x: Any, kind: Any, axes: Sequence[int | None], rule: str, way_out: str, who: str
) -> None:
    """An array of a kind of dtype with these axes; `None` stands for any length."""
    array = is_number(x) or is_traced(x)
    shape = jnp.shape(x) if array else ()
    fits = len(shape) == len(axes) and all(n in (None, m) for n, m in zip(axes, shape, strict=True))
    if not (array and fits and jnp.issubdtype(jnp.result_type(x), kind)):
        arrived = f"{jnp.result_type(x)}{list(shape)}" if array else type(x).__name__
        raise ValueError(f"{who}: {rule}; got {arrived}. {way_out}")


def pair_of(batch: Any, who: str) -> tuple[Any, Any]:
    """Inputs and labels."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ValueError(
            f"{who}: a batch is a pair of inputs and labels; got {type(batch).__name__}{size}. "
            "Write batch=(x, labels)."
        )
    return batch[0], batch[1]


def check_labels(labels: Any, logits: Any, who: str) -> None:
    """One class for each example."""
    rule = "labels are integers, one for each example, of shape (batch,)"
    way_out = "Take the numbers of the classes, from 0."
    check_array(labels, jnp.integer, logits.shape[:1], rule, way_out, who)
