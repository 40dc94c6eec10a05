"""The programs that have a twin in PyTorch (`_twins`), as JAX has them.

Those of `tests/zoo` keep its names, and but for one batch its sizes; `gpt` and `linen_vit` are
models of the benchmarks.
"""

import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks._lib.command import Run
from benchmarks._models.by_hand import DOTS, EACH, UNBATCHED
from benchmarks._models.catalogue import MODELS
from benchmarks._models.flax_modules import linen_model
from benchmarks._models.model import Model, drawn
from jrc.models import gpt
from tests.zoo import catalogue
from tests.zoo.plain_transformers import sizes

POLICIES = {
    EACH: {},
    DOTS: {"policy": jax.checkpoint_policies.dots_saveable},
    UNBATCHED: {"policy": jax.checkpoint_policies.dots_with_no_batch_dims_saveable},
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and what its twin is given.

    Attributes:
        model: The loss, of shapes; its title has the sizes.
        args: Its arguments; the first are the parameters.
        inputs: What the twin reads besides the parameters.
        options: Keyword arguments of the twin.
        sizes: How many blocks a checkpoint of PyTorch spans.
        tolerance: The relative difference that sums in another order may make between the two
            libraries, to the loss and the norm of the gradient.
    """

    model: Model
    args: tuple[Any, ...]
    inputs: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: tuple[int, ...] = (1,)
    tolerance: float = 1e-5

    def written(self, folder: pathlib.Path) -> pathlib.Path:
        """Write parameters and inputs into a file for PyTorch, as `_torch.Arguments` reads it."""
        return write_arguments(folder, self.args[0], self.inputs)


def write_arguments(folder: pathlib.Path, params: Any, inputs: Any) -> pathlib.Path:
    """Write parameters and inputs into a file of a folder, as `_torch.Arguments` reads it."""
    leaves = jax.tree_util.tree_leaves_with_path({"params": params, "inputs": inputs})
    path = folder / "arguments.npz"
    keys = (jax.tree_util.keystr(at, simple=True, separator="/") for at, _ in leaves)
    np.savez(path, **dict(zip(keys, (leaf for _, leaf in leaves), strict=True)))
    return path


def _gpt(toy: bool) -> Program:
    """The GPT of the benchmarks; its mask is an input, as it is a buffer of a module."""
    model = MODELS["gpt"](toy)
    config, shape = model.fn.keywords["config"], model.args[1].shape
    title = f"GPT {config.layers} x {config.width}, {config.length} x {shape[0]}"
    params = gpt.init(jax.random.key(0), config)
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, shape).astype(np.int32)
    mask = np.triu(np.ones((config.length, config.length), bool), 1)
    return Program(
        dataclasses.replace(model, title=title), (params, tokens), (tokens, mask),
        {"heads": config.heads}, (1,) if toy else (1, 3),
    )  # fmt: skip


def _linen_vit(toy: bool) -> Program:
    """The vision transformer of the benchmarks, with random parameters."""
    model = linen_model("linen ViT", toy, batch=4)
    title = "linen ViT (toy)" if toy else "linen ViT, 6 x 256, 4 images of 64 x 64"
    args = drawn(model.args)
    return Program(dataclasses.replace(model, title=title), args, args[1:])


def _of_zoo(name: str, title: str, toy: bool) -> Program:
    """A program of the zoo; its twin reads neither random keys nor running means."""
    program = catalogue.make(name, toy)
    by_hand = {way: program.build(remat) for way, remat in POLICIES.items()}
    # A head of zeros would have no gradient behind it.
    params = jax.tree.map(lambda x: x if np.any(x) else drawn(x), program.args[0])
    loss, args = program.loss, (params, *program.args[1:])
    if name == "mirrored_mlp":
        args = (params, args[1][:_ROWS])
    model = Model(f"{title} (toy)" if toy else title, loss, args, by_hand, program.has_aux)
    inputs = args[3:] if name == "hk_resnet18" else args[1:]
    options = {"heads": sizes(toy)["heads"]} if name.endswith(("former", "decoder")) else {}
    return Program(model, args, inputs, options, tolerance=program.tolerance)


# PyTorch runs each way on CPU; what is saved grows with the rows alone.
_ROWS = 512
_ZOO = {
    "masked_transformer": "transformer with one mask, 8 x 256, 128 x 8",
    "rotary_transformer": "transformer with rotary tables, 8 x 256, 128 x 8",
    "encoder_decoder": "encoder and decoder, 4 + 4 x 256, 128 x 8",
    "mirrored_mlp": "MLP with mirrored skips, 16 x 512, batch 512",
    "unet": "U-Net, 3 levels, 16 images of 64 x 64",
    "densenet": "DenseNet, 10 layers, 16 images of 32 x 32",
    "hk_resnet18": "haiku ResNet-18 with batch norm, 16 images of 64 x 64",
}
PROGRAMS: Mapping[str, Callable[[bool], Program]] = {
    "gpt": _gpt,
    "linen_vit": _linen_vit,
    **{name: functools.partial(_of_zoo, name, title) for name, title in _ZOO.items()},
}
"""Each makes its program at full size, or tiny with `True`."""


def missing(name: str) -> str | None:
    """Return the package that a program needs and that is not installed."""
    return catalogue.missing(name) if name in _ZOO else None


def asked_for(run: Run) -> Iterator[tuple[str, Program]]:
    """Yield the programs of `--models` with their names; say which packages are missing."""
    if not has_torch():
        run.console.print("PyTorch is missing, only jrc's side: pip install torch")
    for name in run.options.models:
        if package := missing(name):
            run.console.print(f"{name}: left out, {package} is not installed")
        else:
            yield name, PROGRAMS[name](run.options.toy)


def has_torch() -> bool:
    """Return whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None
