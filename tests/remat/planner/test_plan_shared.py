"""Values that many blocks read, and what a person would try by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jrc.remat._planner.solver.blocks import find_blocks, longest_repetition

import jrc
from jrc._jaxpr import Program, inline_all
from jrc.remat._gradient.compiled_memory import memory_needed
from jrc.remat._planner.costs.build_cost_graph import build_cost_graph
from jrc.remat._planner.program.unshare import unshared
from jrc.remat._planner.search.problem import PlanningProblem
from tests.remat.measure import largest_error

LAYERS, WIDTH, BATCH, LENGTH, HEADS = 6, 32, 4, 32, 2


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
    keys = iter(jax.random.split(jax.random.key(0), 6 * LAYERS + 1))
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    draw = lambda shape: jax.random.normal(next(keys), shape) / 6  # noqa: E731
    params = [[draw(shape) for shape in shapes] for _ in range(LAYERS)]
    return params, jax.random.normal(next(keys), (BATCH, LENGTH, WIDTH))


@functools.cache
def problem():
    return PlanningProblem.of(loss, arguments(), 0, False, "test")


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


@pytest.mark.slow
def test_the_candidates_have_what_a_person_would_try():
    plan = jrc.plan(loss, *arguments(), budget=1.0, verify=False)
    names = {each.name for each in plan.candidates}
    assert {"nothing recomputed", "everything recomputed", "every block recomputed"} <= names
    assert {"products saved", "products without batch dimensions saved"} <= names
    assert "every block recomputed" in str(plan)


@pytest.mark.slow
def test_every_block_is_what_checkpoint_does():
    """The save set has one residual stream for each border, and recomputes each block once."""
    (every,) = [each for each in problem().by_hand if each.name == "every block recomputed"]
    assert len([stage for stage in every.decision.stages if stage.recomputed]) in range(
        LAYERS - 1, LAYERS + 2
    )
    applied = problem().applied(every, loss)
    plain, lean = (jax.jit(jax.grad(f))(*arguments()) for f in (loss, applied))
    assert largest_error(lean, plain) < 1e-5


def inlined(fn, *args):
    return Program(inline_all(jax.make_jaxpr(fn)(*args)))


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


def test_the_longest_repetition():
    assert longest_repetition("") == longest_repetition("abc") == (0, 0, 0)
    assert longest_repetition("pqrabcabcabx") == (3, 3, 8)
    assert longest_repetition("aaaa") == (0, 1, 4)


def test_a_program_without_repetition_has_no_blocks():
    def fn(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    program = inlined(fn, jnp.ones((3, 3)), jnp.ones((2, 3)))
    active = set(program.jaxpr.invars[:1])
    assert find_blocks(program, build_cost_graph(program, active)) == []
