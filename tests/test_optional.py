"""Packages that only some functions need."""

import importlib.metadata
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

import jrc


def test_neither_flax_nor_orbax_is_imported_before_it_is_needed():
    """A plan is made and applied where neither is installed."""
    run = """
import sys
sys.modules |= {"flax": None, "orbax": None, "orbax.checkpoint": None}
import jax, jax.numpy as jnp, jrc
loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
args = jnp.ones((8, 8)), jnp.ones((512, 8))
plan = jrc.plan(loss, *args, budget=0.5, verify=False)
print(jax.grad(plan.apply(loss))(*args).shape)
"""
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert done.stdout == "(8, 8)\n", done.stderr


@pytest.mark.parametrize(
    ("module", "extra", "call"),
    [
        ("orbax.checkpoint", "orbax", lambda path: jrc.save(path, {"w": jnp.ones(2)})),
        ("orbax.checkpoint", "orbax", lambda path: jrc.restore(path, {"w": jnp.ones(2)})),
        ("flax", "flax", lambda path: jrc.recompute_module(print)),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_extra(
    module, extra, call, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    way_out = rf"Run pip install '\.\[{extra}\]' in a checkout\.$"
    match = rf"^jrc\.\w+: {extra} must be installed\. {way_out}"
    with pytest.raises(ModuleNotFoundError, match=match):
        call(tmp_path)


def test_a_checkout_that_is_not_installed_has_its_version():
    # As on a machine that has JAX and cannot install anything.
    code = """
import importlib.metadata
version = importlib.metadata.version
def missing(name):
    if name == "jrc":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = missing
import jrc
from jrc.remat._planner.plan import plan
print(jrc.__version__)
"""
    root = pathlib.Path(jrc.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == jrc.__version__ == importlib.metadata.version("jrc")
