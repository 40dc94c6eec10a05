"""All programs of the zoo, by name; a package is imported when one of its models is made."""

import ast
import importlib
import importlib.util
import pathlib

from tests.zoo.program import Program

_MODULES = {
    "plain_transformers": (
        "jax",
        "masked_transformer rotary_transformer tied_gpt bf16_gpt encoder_decoder "
        "moe_shared_router scanned_gpt",
    ),
    "plain_nets": ("jax", "unet densenet mirrored_mlp lstm_scan branches own_checkpoints"),
    "equinox_models": ("equinox", "eqx_mlp eqx_vit eqx_batchnorm"),
    "haiku_models": ("haiku", "hk_resnet18 hk_transformer"),
    "numpyro_models": ("numpyro", "numpyro_vae"),
    "linen_models": (
        "flax",
        "linen_transformer linen_remat linen_scan linen_remat_scan linen_batchnorm",
    ),
    "nnx_models": ("flax", "nnx_transformer nnx_remat nnx_batchnorm nnx_scan nnx_llama"),
    "keras_models": ("keras", "keras_convnet keras_transformer keras_remat"),
    "diffrax_models": ("diffrax", "diffrax_ode"),
    "brax_models": ("brax", "brax_ppo"),
    "gemma_models": ("gemma", "gemma"),
    "small_nets": (
        "jax",
        "two_towers actor_critic particle_vae group_norm_convs batch_norm_convs gated_mlp triplets "
        "deep_sets graph_net conv_autoencoder latent_attention pooled_text",
    ),
}
_PLACES = {
    name: (module, package)
    for module, (package, names) in _MODULES.items()
    for name in names.split()
}
NAMES = tuple(_PLACES)
SMALL = tuple(name for name, (module, _) in _PLACES.items() if module == "small_nets")
"""Those that only benchmarks look at closely; tests compare the gradients of their plans."""


def missing(name: str) -> str | None:
    """Return the package that a program needs and that is not installed."""
    package = _PLACES[name][1]
    return None if importlib.util.find_spec(package) else package


def description(name: str) -> str:
    """Return what a program is, in a sentence without its full stop, also without its package."""
    source = pathlib.Path(__file__).with_name(f"{_PLACES[name][0]}.py").read_text()
    makers = {each.name: each for each in ast.parse(source).body if hasattr(each, "name")}
    return (ast.get_docstring(makers[name]) or "").partition("\n")[0].rstrip(".")


def make(name: str, toy: bool) -> Program:
    """Return a program of the zoo.

    Args:
        name: One of `NAMES`.
        toy: Whether it is tiny: it compiles in seconds.
    """
    module = importlib.import_module(f"tests.zoo.{_PLACES[name][0]}")
    return getattr(module, name)(toy)
