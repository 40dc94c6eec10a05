"""All programs of packages of others, by name; a package is imported when its program is made."""

import dataclasses
import importlib
import importlib.util

from tests.zoo.program import Program

TOLERANCE = 1e-5
"""Of gradients: plans in chunks add up in another order, which is 1e-6 to 4e-6."""
_MODULES = {
    "decoder_programs": ("optax", "decoder_softcap decoder_alibi decoder_scanned hidden_loss"),
    "curvature_programs": ("flax", "hessian per_example"),
    "dinosaur_programs": ("dinosaur", "dinosaur_weather"),
    "jax_cfd_programs": ("jax_cfd", "cfd_finite_volume cfd_spectral"),
    "jax_md_programs": ("jax_md", "md_simulation md_behler_parrinello nequip_forces"),
    "flaxdiff_programs": ("flaxdiff", "flaxdiff_unet flaxdiff_dit"),
    "distrax_programs": ("distrax", "distrax_flow"),
    "maxtext_programs": ("maxtext", "maxtext_llama"),
    "brax_programs": ("brax", "brax_rollout"),
    "keras_programs": ("keras_hub", "keras_gemma"),
    "numpyro_programs": ("numpyro", "numpyro_network numpyro_series"),
    "haiku_programs": ("haiku", "haiku_lstm haiku_mobilenet"),
}
_PLACES = {
    name: (module, package)
    for module, (package, names) in _MODULES.items()
    for name in names.split()
}
NAMES = tuple(_PLACES)


def package_of(name: str) -> str:
    """Return the package whose code a program is."""
    return _PLACES[name][1]


def missing(name: str) -> str | None:
    """Return the package that a program needs and that is not installed."""
    package = package_of(name)
    return None if importlib.util.find_spec(package) else package


def make(name: str, toy: bool) -> Program:
    """Return a program, with the tolerance of these benchmarks.

    Args:
        name: One of `NAMES`.
        toy: Whether it is tiny: it compiles in seconds.
    """
    module = importlib.import_module(f"benchmarks.memory._others.{_PLACES[name][0]}")
    program = getattr(module, name)(toy)
    return dataclasses.replace(program, tolerance=TOLERANCE)
