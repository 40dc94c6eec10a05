"""Every program of the zoo: explained, planned, and not beaten by a person's checkpoints."""

import functools

import jax
import pytest

import jrc
from jrc.remat._gradient.compiled_memory import memory_needed
from tests.zoo.catalogue import NAMES, SMALL, make, missing
from tests.zoo.known_failures import FAILURES
from tests.zoo.program import gradient, gradient_error

# Packages warn, and add arrays of different ranks.
pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = ("lstm_scan",)
"""Those that every run of the tests goes through; the others are marked `slow`."""

EXPLAINED = {
    "tied_gpt",
    "unet",
    "eqx_vit",
    "nnx_llama",
    "keras_remat",
}
"""Those that are explained at every change, none that is planned too."""


def programs(test, quick=QUICK, long=(), left_out=SMALL):
    """The programs as parameters, with what is known of them."""
    found = []
    for name in NAMES:
        if name in left_out:
            continue
        marks = [] if name in quick else [pytest.mark.slow(every=True)]
        if name in long:
            marks.append(pytest.mark.exhaustive)
        if reason := FAILURES.get(test, {}).get(name):
            marks.append(pytest.mark.xfail(strict=True, reason=reason))
        found.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("name", found)


@pytest.fixture(autouse=True)
def ranks_are_promoted():
    before = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", before)


@functools.cache
def program_of(name):
    if package := missing(name):
        pytest.skip(f"{package} is not installed: it is in the extra `zoo`")
    return make(name, True)


def leanest(name, **options):
    program = program_of(name)
    options |= dict(argnums=program.argnums, has_aux=program.has_aux)
    return jrc.plan(program.loss, *program.args, budget=0.0, **options)


def peak(program, fn):
    """Peak bytes of the compiled gradient."""
    run, arrays = gradient(program, fn)
    return memory_needed(jax.jit(run).lower(*arrays)).peak


@programs("explained", long=set(NAMES) - EXPLAINED)
def test_explained(name):
    program = program_of(name)
    options = dict(argnums=program.argnums, has_aux=program.has_aux)
    report = jrc.explain(program.loss, *program.args, **options)
    assert report.saved and report.flops > 0


PLANNED = {
    "numpyro_vae",
    "scanned_gpt",
    "eqx_mlp",
    "linen_remat_scan",
    "keras_convnet",
    "nnx_scan",
    "particle_vae",
    "graph_net",
    "triplets",
}
"""Those that are planned at every change."""


@programs("planned", long=set(NAMES) - PLANNED, left_out=())
def test_planned(name):
    """The leanest plan changes no gradient, without fusion, where rounding is the same."""
    program = program_of(name)
    plan = leanest(name, verify=False)
    options = {"xla_disable_hlo_passes": "fusion", "xla_backend_optimization_level": 0}
    found = []
    for fn in (plan.apply(program.loss), program.loss):
        run, arrays = gradient(program, fn)
        found.append(jax.jit(run, compiler_options=options)(*arrays))
    assert gradient_error(*(grads for _, grads in found)) < program.tolerance


@programs(
    "leanest",
    quick=(),
    long=set(NAMES) - {"nnx_batchnorm", "brax_ppo", "diffrax_ode", "keras_convnet", "numpyro_vae"},
)
def test_blocks_by_hand_are_not_leaner(name):
    """A checkpoint around each block has no lower peak than the leanest plan."""
    program = program_of(name)
    if not program.by_hand:
        pytest.skip("the package has no blocks that a user could wrap")
    by_hand = peak(program, program.build({}))
    assert peak(program, leanest(name).apply(program.loss)) <= by_hand
