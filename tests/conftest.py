"""Every test runs on eight CPU devices, with warnings as errors and no silent rank promotion.

XLA's machine code is not optimised, in child processes neither: a third of the suite's time was
spent on that. `XLA_FLAGS= python -m pytest` runs it with the code that users have.

Equal programs are compiled once for all workers and child processes: they share a folder of XLA's
results, made for this run alone. That is an eighth of the time.

The default run has every capability, in few cases each. `-m slow` runs other cases, and
`-m exhaustive` more of the same; `slow(after=3)` and `exhaustive(after=3)` do not mark the first
three parameter sets of a test. Of the slow sets of a test all but the first are exhaustive, unless
it is marked `slow(every=True)`: `.ci/run` runs all of them.

Modules draw their arrays with `tests/draws.py`, and tests compare many small results in one program
or in NumPy: JAX compiles each operator for each shape, and every worker imports every module.

In tests of the default run the annotations of `jrc` are checked (`tests/typechecked.py`), unless a
test expects an error: it passes wrong types on purpose. Slow tests are other cases of the same, and
are run without these checks.
"""

import collections
import gc
import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# For child processes too: an installed compiler of another platform changes no test.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="jrc-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # Each process would compile the sources of JAX, jrc and the tests: twelve seconds of a worker,
    # three of the five of a child process. They are kept for later runs, beside no source.
    sources = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "pycache"
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(sources)
    sys.dont_write_bytecode = False

if "JRC_HOST_RATES" not in os.environ:
    # Plans of the suite are those of one machine, wherever it runs.
    rates = tempfile.NamedTemporaryFile("w", prefix="jrc-rates-", suffix=".json")  # noqa: SIM115
    of_a_machine = {"products": 1e11, "convolutions": 5e10, "functions": 3e9, "bandwidth": 2e10}
    of_a_machine |= {"launch": 1e-6, "new_memory": 5e9, "slow_convolutions": 2e9, "strided": 2e8}
    json.dump(of_a_machine, rates)
    rates.flush()
    os.environ["JRC_HOST_RATES"] = rates.name

import jax  # noqa: E402
import pytest  # noqa: E402

from tests import typechecked  # noqa: E402

typechecked.install()

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Take a mark with `after` off the first sets of a test, and mark its further slow ones."""
    seen, slow = collections.Counter(), set()
    for item in items:
        test = item.parent.nodeid, getattr(item, "originalname", item.name)
        item.own_markers = [m for m in item.own_markers if seen[test] >= m.kwargs.get("after", 0)]
        seen[test] += 1
        mark = item.get_closest_marker("slow")
        if mark is None or item.get_closest_marker("exhaustive"):
            continue
        if test in slow and not mark.kwargs.get("every"):
            item.add_marker(pytest.mark.exhaustive)
        slow.add(test)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """What is there before the first test is no garbage; XLA is asked at each look for some."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(autouse=True, scope="module")
def annotations_are_checked_again():
    """Check the first calls that a file of tests makes."""
    typechecked.begin_again()


@pytest.fixture(autouse=True)
def annotations_are_checked(request):
    """Check annotations in tests that pass right types: a wrong one would fail before its test."""
    slow = any(map(request.node.get_closest_marker, ("slow", "exhaustive")))
    typechecked.switch(not slow and not _passes_wrong_types(request))
    yield
    typechecked.switch(True)


def _passes_wrong_types(request):
    code = getattr(getattr(request, "function", None), "__code__", None)
    return code is not None and "raises" in _names(code)


def _names(code):
    """Every name that a function and the functions inside of it read."""
    inner = (const for const in code.co_consts if isinstance(const, type(code)))
    return {*code.co_names, *(name for each in inner for name in _names(each))}
