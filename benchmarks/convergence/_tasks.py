"""The tasks of `benchmarks.convergence.train`: digits, a GPT and an LSTM, with data and settings.

Images and text are those of the examples (`train_resnet.py`, `train_gpt.py`). A batch depends on
the seed of the run and the step alone, not on the number of replicas.
"""

import dataclasses
import functools
import math
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from benchmarks._lib.examples import Source, batch_at, read_text, split_text
from benchmarks._models import lstm
from jrc.models import gpt, resnet

Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        title: What it is, for a table.
        settings: Everything that the figures depend on, except seed and method.
        init: `key -> (params, model_state)`; the latter is None without one.
        loss_fn: The loss for `jrc.make_train_step`, nats.
        batch_of: `(seed, step) -> batch`, for all replicas together.
        evaluate: `(params, model_state) -> {"loss", ...}` on held-out data.
        metric: Which of the figures that `evaluate` returns is compared.
        higher_is_better: Whether more of the metric is better.
        unit: The unit of the loss.
        per_nat: How many of this unit a nat is.
    """

    title: str
    settings: Settings
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: Callable[..., Any]
    batch_of: Callable[[int, int], Any]
    evaluate: Callable[[Any, Any], dict[str, float]]
    metric: str
    higher_is_better: bool
    unit: str
    per_nat: float


SHARED: Settings = {"momentum": 0.9, "clip": 1.0, "evaluations": 12}
SIZES: Mapping[str, Settings] = {
    "digits": {"depth": 20, "width": 16, "batch": 32, "steps": 1000, "rate": 0.1, "min_size": 512},
    "gpt": {
        "layers": 2, "heads": 4, "width": 64, "length": 32, "batch": 8, "steps": 10_000,
        "rate": 0.3, "min_size": 2048,
    },
    "lstm": {
        "width": 64, "length": 32, "batch": 8, "steps": 10_000, "rate": 1.0, "min_size": 2048,
    },
}  # fmt: skip
TRIED = {
    "digits": {"steps": 400, "loss": {"0.03": 0.070, "0.1": 0.036, "0.3": 0.035},
               "accuracy": {"0.03": 0.983, "0.1": 0.992, "0.3": 0.989}},
    "gpt": {"steps": 10_000, "loss": {"0.3": 2.264, "0.5": 2.276}},
    "lstm": {"width": 128, "steps": 2000, "loss": {"0.3": 2.476, "1.0": 2.356, "2.0": 2.374}},
}  # fmt: skip
"""What dense momentum SGD on four replicas reached with seed 0, by rate; the LSTM twice as wide."""

TOY: Mapping[str, Settings] = {
    "digits": {"depth": 8, "width": 8, "batch": 16},
    "gpt": {"layers": 1, "width": 32, "length": 16, "batch": 8, "min_size": 1024},
    "lstm": {"width": 32, "length": 16, "batch": 8, "min_size": 1024},
}
TOY_STEPS = 6


def settings_of(name: str, toy: bool, steps: int | None) -> Settings:
    """Return the settings of a task; the warm-ups are shares of its steps."""
    found = SHARED | SIZES[name]
    if toy:
        found |= TOY[name] | {"steps": TOY_STEPS, "evaluations": 2}
    found["steps"] = steps or found["steps"]
    found["rate_warm_up"] = max(1, found["steps"] // 20)
    found["rampup_step"] = max(1, found["steps"] // 10)
    return found


def build(name: str, toy: bool, steps: int | None, data: pathlib.Path | None) -> Task:
    """Return a task, with its data read."""
    settings = settings_of(name, toy, steps)
    return TASKS[name](settings, data) if name == "digits" else TASKS[name](settings)


def _digits(settings: Settings, data: pathlib.Path | None) -> Task:
    source = Source(SimpleNamespace(data=data, seed=0))
    images = source.images
    config = resnet.Config(
        depth=settings["depth"], classes=10, channels=images.train_x.shape[-1],
        width=settings["width"], stem="cifar",
    )  # fmt: skip
    measured = jax.jit(functools.partial(resnet.loss, config=config, train=False))

    def evaluate(params: Any, model_state: Any) -> dict[str, float]:
        def of(part: Any) -> tuple[float, dict[str, float]]:
            loss, (_, aux) = measured(params, model_state, part)
            return {"loss": loss, **aux}, len(part[1])

        return _mean(of(part) for part in source.tests())

    def batch_of(seed: int, step: int) -> Any:
        # A source draws from its seed and the step.
        source.seed = seed
        return source.batch_at(step, settings["batch"])

    where = "CIFAR-10" if data else "scikit-learn's digits"
    return Task(
        title=f"ResNet-{config.depth}, width {settings['width']}, on {where}",
        settings=settings | {"data": where, "crc32": zlib.crc32(images.train_x)},
        init=functools.partial(resnet.init, config=config),
        loss_fn=functools.partial(resnet.loss, config=config),
        batch_of=batch_of,
        evaluate=evaluate,
        metric="accuracy",
        higher_is_better=True,
        unit="nats",
        per_nat=1.0,
    )


def _gpt(settings: Settings) -> Task:
    names = ("layers", "heads", "width", "length")
    config = gpt.Config(**{name: settings[name] for name in names})
    title = f"GPT, {config.layers} x {config.width}, on bytes of Python source"
    loss_fn = functools.partial(gpt.loss, config=config)
    return _on_text(title, settings, functools.partial(gpt.init, config=config), loss_fn)


def _lstm(settings: Settings) -> Task:
    title = f"LSTM, 2 x {settings['width']}, on bytes of Python source"
    init = functools.partial(lstm.init, width=settings["width"])
    return _on_text(title, settings, init, lstm.loss)


def _on_text(
    title: str,
    settings: Settings,
    init: Callable[[jax.Array], Any],
    loss_fn: Callable[..., Any],
) -> Task:
    """Return the task of a byte-level model; the held-out text is of other files."""
    text, length = read_text(None), settings["length"]
    train_text, held_out = split_text(text, length)
    tests = [batch_at(held_out, part, 128, length, 0) for part in range(2)]
    measured = jax.jit(lambda params, batch: loss_fn(params, batch, None))

    def evaluate(params: Any, model_state: Any) -> dict[str, float]:
        del model_state
        return _mean(({"loss": measured(params, part) / math.log(2)}, 1) for part in tests)

    return Task(
        title=title,
        settings=settings | {"data": "the standard library", "crc32": zlib.crc32(text)},
        init=lambda key: (init(key), None),
        loss_fn=loss_fn,
        batch_of=lambda seed, step: batch_at(train_text, step, settings["batch"], length, seed),
        evaluate=evaluate,
        metric="loss",
        higher_is_better=False,
        unit="bits per byte",
        per_nat=1 / math.log(2),
    )


def _mean(parts: Iterator[tuple[dict[str, Any], int]]) -> dict[str, float]:
    """Return the weighted mean of figures."""
    found, weights = zip(*parts, strict=True)
    return {
        name: float(np.average([float(figures[name]) for figures in found], weights=weights))
        for name in found[0]
    }


TASKS: Mapping[str, Callable[..., Task]] = {"digits": _digits, "gpt": _gpt, "lstm": _lstm}
