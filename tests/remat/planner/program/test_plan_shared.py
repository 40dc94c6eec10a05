"""Values that many blocks read, and what a person would write by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc._jaxpr import Program, inline_all
from jrc._jaxpr.unshare import unshared
from jrc.remat._gradient.compiled_memory import memory_needed
from jrc.remat._planner.plan.decision import variable_at
from tests.draws import normal
from tests.remat.measure import largest_error, operators
from tests.remat.planner.problems import applied, named, problem_of, program_of

LAYERS, WIDTH, BATCH, LENGTH, HEADS = 4, 32, 4, 32, 2


def block(p, x, mask, tables):
    h = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
    q, k, v = ((h @ w).reshape(BATCH, LENGTH, HEADS, -1) for w in p[:3])
    q, k = (a * tables[0] + jnp.roll(a, 1, -1) * tables[1] for a in (q, k))
    scores = jnp.where(mask[:, None], jnp.einsum("bthd,bshd->bhts", q, k), -1e9)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + out @ p[3]
    return x + jax.nn.gelu(x @ p[4]) @ p[5]


def loss(params, x, wrap=lambda fn: fn):
    """A transformer whose mask and rotary tables are made once, and read by every block."""
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))
    scales = jnp.exp(-jnp.arange(WIDTH // HEADS) / 8.0)
    angles = (jnp.arange(LENGTH)[:, None] * scales[None])[None, :, None]
    tables = jnp.cos(angles), jnp.sin(angles)
    for p in params:
        x = wrap(block)(p, x, mask, tables)
    return jnp.mean(x**2)


def arguments():
    seeds = itertools.count()
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    draw = lambda shape: normal(next(seeds), *shape, scale=1 / 6)  # noqa: E731
    params = [[draw(shape) for shape in shapes] for _ in range(LAYERS)]
    return params, normal(next(seeds), BATCH, LENGTH, WIDTH)


@functools.cache
def problem():
    return problem_of(loss, arguments())


def compiled_peak(fn):
    return memory_needed(jax.jit(jax.value_and_grad(fn)).lower(*arguments())).peak


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_shared_mask_does_not_join_the_blocks():
    plan = jrc.plan(loss, *arguments(), budget=0.0)
    by_hand = compiled_peak(functools.partial(loss, wrap=jax.checkpoint))
    assert plan.verified.peak_bytes <= 1.1 * by_hand
    assert len(plan.decision.stages) >= LAYERS
    plain, lean = (jax.jit(jax.grad(f))(*arguments()) for f in (loss, plan.apply(loss)))
    assert largest_error(lean, plain) < 1e-5


# An attention and an MLP for each layer; what is behind the last cut is left to JAX.
HALVES = f"{2 * LAYERS - 1} regions recomputed"


@pytest.mark.exhaustive
def test_the_candidates_have_what_a_person_would_write():
    plan = jrc.plan(loss, *arguments(), budget=1.0, verify=False)
    names = {each.name for each in plan.candidates}
    assert {"baseline", "everything recomputed", HALVES} <= names
    assert {"products saved", "products without batch dimensions saved"} <= names
    assert HALVES in str(plan)


@pytest.mark.slow
def test_regions_are_what_checkpoint_does():
    """One residual stream is saved at each border, and each region is recomputed once."""
    program = program_of(problem())

    def streams(region):
        saved = [variable_at(program, place).aval for place in region.saved]
        return [x.shape for x in saved if x.dtype == jnp.float32].count((BATCH, LENGTH, WIDTH))

    found = [each for name, each in named(problem()).items() if name.startswith(HALVES)]
    (option, *_) = [
        each for each in found if all(streams(region) == 1 for region in each.stages.regions)
    ]
    assert len(option.stages.regions) == 2 * LAYERS - 1
    fn = applied(problem(), option)
    plain, lean = (jax.jit(jax.grad(f))(*arguments()) for f in (loss, fn))
    assert largest_error(lean, plain) < 1e-5
    before, after = (operators(jax.grad(f), *arguments())["dot_general"] for f in (loss, fn))
    assert before < after <= before + operators(loss, *arguments())["dot_general"]
    assert compiled_peak(fn) <= 1.1 * compiled_peak(functools.partial(loss, wrap=jax.checkpoint))


def inlined(fn, *args):
    return Program(inline_all(jax.make_jaxpr(fn)(*args)))


@pytest.mark.slow
def test_copies_are_for_readers_that_stand_apart():
    program = inlined(loss, *arguments())
    copied = unshared(program)
    count = lambda p, name: sum(eqn.primitive.name == name for eqn in p.eqns)  # noqa: E731
    assert count(copied, "cos") >= LAYERS - 1 > count(program, "cos") == 1
    assert count(copied, "dot_general") == count(program, "dot_general")
    args = jax.tree.leaves(arguments())
    results = [jax.core.eval_jaxpr(p.jaxpr, p.jaxpr.consts, *args) for p in (program, copied)]
    assert bool(jnp.array_equal(*(r[0] for r in results)))


def far_apart(x, table, count=30):
    for _ in range(count):
        x = jnp.tanh(x @ x)
    return jnp.sum(x * table)


@pytest.mark.parametrize("name", ["made of data", "effect", "product"])
def test_what_is_not_cheap_is_not_copied(name):
    def fn(x):
        if name == "made of data":
            table = jnp.exp(x)
        elif name == "effect":
            table = jnp.arange(9.0).reshape(3, 3)
            jax.debug.print("{}", table)
        else:
            table = jnp.ones((3, 3)) @ jnp.ones((3, 3))
        return jnp.sum(table) + far_apart(x, table)

    program = inlined(fn, jnp.ones((3, 3)))
    made = lambda p: [e.primitive.name for e in p.eqns].count  # noqa: E731
    for primitive in ("exp", "debug_callback", "debug_print", "dot_general"):
        assert made(unshared(program))(primitive) == made(program)(primitive)
