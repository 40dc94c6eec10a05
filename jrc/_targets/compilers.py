"""The versions of the compilers that JAX finds: what a compiled program depends on beside JAX."""

import importlib.metadata
import os
import re

import jax

# XLA for CPUs is in jaxlib, for GPUs in a plugin whose kernels are a distribution of their own.
_COMPILERS = re.compile(r"jaxlib|libtpu.*|jax-.+-(pjrt|plugin)|jax-metal")


def compiler_versions() -> dict[str, str]:
    """Return the version of JAX and of each compiler that is installed, by distribution.

    A libtpu that the environment variable `TPU_LIBRARY_PATH` names has the time of its last change
    for a version.

    >>> list(compiler_versions())[:2]
    ['jax', 'jaxlib']
    """
    found = {}
    for each in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", each.name or "").lower()
        if _COMPILERS.fullmatch(name):
            found.setdefault(name, each.version)
    path = os.environ.get("TPU_LIBRARY_PATH", "")
    if os.path.isfile(path):
        found[path] = str(os.stat(path).st_mtime_ns)
    others = sorted(found.items(), key=lambda item: (item[0] != "jaxlib", item))
    return {"jax": jax.__version__, **dict(others)}
