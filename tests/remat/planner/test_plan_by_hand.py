"""No plan is beaten by `jax.checkpoint` around each block, on programs whose values skip blocks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jrc.remat._planner.solver.blocks import repetitions

import jrc
from jrc._jaxpr import Program, flops, inline_all, walk
from jrc.remat._gradient.compiled_memory import memory_needed
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.program.unshare import unshared
from jrc.remat._planner.search.problem import PlanningProblem
from tests.remat.measure import largest_error, operators

DEPTH = 8


def mirrored(wrap):
    """An MLP with skips from its first half to the mirrored second half."""
    dense = wrap(lambda w, x: jax.nn.gelu(x @ w))
    merge = wrap(lambda w, x, skip: jax.nn.gelu(x @ w) + skip)

    def loss(weights, x):
        skips = []
        for w in weights[: DEPTH // 2]:
            skips.append(x)
            x = dense(w, x)
        for w in weights[DEPTH // 2 :]:
            x = merge(w, x, skips.pop())
        return jnp.mean(x**2)

    keys = jax.random.split(jax.random.key(0), DEPTH)
    return loss, [jax.random.normal(k, (32, 32)) / 6 for k in keys], jnp.ones((512, 32))


def unet(wrap):
    """A convolutional net with pooling on the way down, and skips to the way up."""

    def conv(w, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
        return jax.nn.silu(x)

    block = wrap(lambda p, x: conv(p[1], conv(p[0], x)))

    def loss(params, x):
        skips = []
        for p in params[:2]:
            x = block(p, x)
            skips.append(x)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = block(params[2], x)
        for p in params[3:]:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = block(p, jnp.concatenate([x, skips.pop()], -1))
        return jnp.mean(x**2)

    widths = [(4, 8, 8), (8, 16, 16), (16, 16, 16), (32, 16, 16), (24, 8, 8)]
    draw = lambda i, o: jax.random.normal(jax.random.key(i), (3, 3, i, o)) / 9  # noqa: E731
    return loss, [(draw(a, b), draw(b, c)) for a, b, c in widths], jnp.ones((2, 32, 32, 4))


def encoder_decoder(wrap):
    """Every layer of the decoder reads what the encoder returned."""
    encode = wrap(lambda p, x: x + jax.nn.gelu(x @ p[0]) @ p[1])

    @wrap
    def decode(p, x, memory):
        weights = jax.nn.softmax(x @ p[0] @ memory.T)
        x = x + weights @ memory
        return x + jax.nn.gelu(x @ p[1]) @ p[2]

    def loss(params, x):
        memory = y = x
        for p in params[0]:
            memory = encode(p, memory)
        for p in params[1]:
            y = decode(p, y, memory)
        return jnp.mean(y**2)

    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape) / 8  # noqa: E731
    encoder = [(draw(i, 16, 64), draw(i, 64, 16)) for i in range(3)]
    decoder = [(draw(i, 16, 16), draw(i, 16, 64), draw(i, 64, 16)) for i in range(3)]
    return loss, (encoder, decoder), jnp.ones((128, 16))


NETS = [mirrored, unet, encoder_decoder]


def compiled_peak(fn, *args):
    return memory_needed(jax.jit(jax.value_and_grad(fn)).lower(*args)).peak


@pytest.mark.exhaustive_after(1)
@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
def test_block_checkpoints_by_hand_need_no_less(net):
    loss, *args = net(lambda fn: fn)
    wrapped = net(jax.checkpoint)[0]
    by_hand = compiled_peak(wrapped, *args)
    assert jrc.plan(loss, *args, budget=0.0).verified.peak_bytes <= by_hand
    cost = flops(jax.make_jaxpr(jax.value_and_grad(wrapped))(*args))
    assert jrc.plan(loss, *args, budget=by_hand).verified.flops <= cost


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
def test_every_block_has_the_gradients_of_the_function(net):
    loss, *args = net(lambda fn: fn)
    problem = PlanningProblem.of(loss, tuple(args), 0, False, "test")
    (every,) = [each for each in problem.by_hand if each.name == "every block recomputed"]
    # What stands between blocks, and the last of them, is left to JAX.
    assert {stage.region for stage in every.decision.stages} == {True, False}
    plan = Plan.from_json(problem.plan_of(every, 1, {}).to_json())
    assert plan.decision == every.decision
    plain, lean = (jax.jit(jax.grad(f))(*args) for f in (loss, plan.apply(loss)))
    assert largest_error(lean, plain) < 1e-5


def embedded(wrap):
    """Layers of another width than the first, between an embedding and a head with a norm."""
    block = wrap(lambda p, x: x + jnp.tanh(normed(x) @ p[0]) @ p[1])

    def normed(x):
        return (x - jnp.mean(x, -1, keepdims=True)) / (1 + jnp.max(x, -1, keepdims=True))

    def loss(params, tokens):
        x = params["table"][tokens] + params["positions"][None]
        for p in params["blocks"]:
            x = block(p, x)
        return jnp.mean(jax.nn.log_softmax(normed(x) @ params["head"])[..., 0])

    widths = (24, 32, 32, 32)
    blocks = [(jnp.ones((16, width)), jnp.ones((width, 16))) for width in widths]
    params = {"table": jnp.ones((8, 16)), "positions": jnp.ones((12, 16)), "blocks": blocks}
    return loss, params | {"head": jnp.ones((16, 8))}, jnp.zeros((4, 12), int)


def regions_of(fn, *args):
    """The operators of each region, but those that compute nothing."""
    eqns = inline_all(jax.make_jaxpr(fn)(*args).jaxpr).eqns
    bodies = [inline_all(eqn.params["jaxpr"]) for eqn in eqns if eqn.primitive.name == "remat2"]
    light = {"broadcast_in_dim", "reshape", "jit"}
    names = [[eqn.primitive.name for eqn in body.eqns] for body in bodies]
    return [[name for name in each if name not in light] for each in names]


@pytest.mark.parametrize("net", [encoder_decoder, embedded])
def test_every_block_is_what_a_person_wraps(net):
    """Neither what stands in front of a stack of layers is in a region, nor what follows it."""
    loss, *args = net(lambda fn: fn)
    by_hand = regions_of(net(jax.checkpoint)[0], *args)
    problem = PlanningProblem.of(loss, tuple(args), 0, False, "test")
    for name, count in (("", len(by_hand) - 1), (", the last too", len(by_hand))):
        (every,) = [c for c in problem.by_hand if c.name == f"every block recomputed{name}"]
        assert regions_of(problem.applied(every, loss), *args) == by_hand[:count]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("net", NETS)
def test_flops_of_the_plain_gradient_are_those_that_are_counted(net):
    loss, *args = net(lambda fn: fn)
    problem = PlanningProblem.of(loss, tuple(args), 0, False, "test")
    assert problem.flops == flops(jax.make_jaxpr(jax.value_and_grad(loss))(*args))


@pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False), reason="regions of the next remat hide their barriers"
)
@pytest.mark.parametrize(
    ("length", "unroll", "has_barrier"), [(6, 1, False), (6, 2, True), (1, 1, True)]
)
def test_a_barrier_stands_where_xla_could_merge(length, unroll, has_barrier):
    """Not around the body of a loop: its backward pass is a loop of its own."""

    def loss(w, x):
        step = lambda x, w: (x + jnp.tanh(jnp.sin(x @ w) @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, w, unroll=unroll)[0])

    args = jnp.ones((length, 8, 8)), jnp.ones((64, 8))
    problem = PlanningProblem.of(loss, args, 0, False, "test")
    (every,) = [each for each in problem.by_hand if each.name == "every step recomputed"]
    jaxpr = jax.make_jaxpr(problem.applied(every, loss))(*args)
    found = [eqn.params["prevent_cse"] for eqn, _ in walk(jaxpr) if eqn.primitive.name == "remat2"]
    assert found[0] == has_barrier  # the other one stands behind the loop


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
def test_flops_by_hand_are_those_that_are_counted(net):
    loss, *args = net(lambda fn: fn)
    problem = PlanningProblem.of(loss, tuple(args), 0, False, "test")
    blocks = [each for each in problem.by_hand if "block" in each.name]
    assert blocks
    for each in blocks:
        predicted = problem.predicted(each).flops
        assert abs(problem.counted(each) - predicted) <= 0.01 * problem.flops


@pytest.mark.slow
def test_blocks_by_hand_run_nothing_twice_that_must_run_once():
    """A bare checkpoint would; what `jrc.keep_op` tags is as a collective is."""

    def loss(w, x, op):
        for _ in range(6):
            x = x + jnp.tanh(op(jnp.cos(x @ w)) @ w)
        return jnp.sum(x**2)

    args = jnp.eye(16), jnp.ones((64, 16))
    tagged = functools.partial(loss, op=jrc.keep_op(jnp.sin))
    names = [
        {each.name for each in PlanningProblem.of(fn, args, 0, False, "test").by_hand}
        for fn in (functools.partial(loss, op=jnp.sin), tagged)
    ]
    assert "every block recomputed" in names[0] - names[1]
    problem = PlanningProblem.of(tagged, args, 0, False, "test")
    for each in problem.all:
        counts = operators(jax.grad(problem.applied(each, tagged)), *args)
        assert counts["sin"] == operators(jax.grad(tagged), *args)["sin"]


def branching(wrap):
    """Layers that a condition may skip."""
    layer = wrap(lambda w, x: jnp.tanh(jnp.sin(jnp.cos(x @ w)) @ w))

    def loss(weights, x, skipped):
        for i, w in enumerate(weights):
            x = jax.lax.cond(skipped[i], lambda w, x: x, layer, w, x)
        return jnp.sum(x**2)

    return loss, [jnp.eye(32)] * 4, jnp.ones((256, 32)), jnp.arange(4) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("every branch recomputed", None),
        ("every branch recomputed, products saved", jax.checkpoint_policies.dots_saveable),
    ],
)
def test_branches_under_checkpoint_are_a_way_by_hand(name, policy):
    loss, *args = branching(lambda fn: fn)
    problem = PlanningProblem.of(loss, tuple(args), 0, False, "test")
    (every,) = [each for each in problem.by_hand if each.name == name]
    wrapped = branching(functools.partial(jax.checkpoint, policy=policy))[0]
    by_hand = jax.jit(jax.value_and_grad(wrapped)).lower(*args)
    assert memory_needed(problem.lowered(every)).peak <= memory_needed(by_hand).peak
    ours = problem.applied(every, loss)
    assert largest_error(*(jax.grad(fn)(*args) for fn in (ours, wrapped))) == 0
    assert (
        operators(jax.grad(ours), *args)["dot_general"]
        == (operators(jax.grad(wrapped), *args)["dot_general"])
    )


@pytest.mark.slow
def test_each_branch_saves_what_a_policy_says_of_it():
    """One has products with batch dimensions, the other has none; a policy is for both."""

    def attend(w, x):
        return jnp.einsum("blm,bmw->blw", jnp.tanh(jnp.einsum("blw,bmw->blm", x @ w, x)), x)

    def feed(w, x):
        return jnp.sin(jnp.tanh(x @ w) @ w)

    def loss(weights, x, kinds):
        for i, w in enumerate(weights):
            x = jax.lax.cond(kinds[i], attend, feed, w, x)
        return jnp.sum(x**2)

    args = [jnp.eye(16)] * 4, jnp.ones((4, 8, 16)), jnp.arange(4) == 1
    problem = PlanningProblem.of(loss, args, 0, False, "test")
    name = "every branch recomputed, products without batch dimensions saved"
    names = {each.name: each for each in problem.all if each.name}
    counts = [
        operators(jax.grad(problem.applied(names[each], loss)), *args)["dot_general"]
        for each in ("every branch recomputed", name)
    ]
    # One of `attend`, both of `feed`: the derivative of `sin` reads the second.
    assert counts[0] - counts[1] == 3 * 4


def test_blocks_that_normalise_over_a_mapped_axis_are_recomputed():
    """The mean over `jax.vmap`'s axis is no collective, which would run once."""

    def loss(weights, x):
        def net(x):
            for w in weights:
                x = jnp.tanh(x @ w)
                x = x - jax.lax.pmean(x, "batch")
            return jnp.sum(x**2)

        return jnp.sum(jax.vmap(net, axis_name="batch")(x))

    args = [jnp.eye(16)] * 4, jnp.ones((64, 16))
    problem = PlanningProblem.of(loss, args, 0, False, "test")
    assert "every block recomputed" in {each.name for each in problem.by_hand}


def wave(p, x):
    """A step of a wave equation, without a product."""
    around = jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) + jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1)
    return x + 0.1 * jnp.tanh((around - 4 * x) * p) * jnp.sin(x)


def adapted(p, x):
    """A layer whose weights are a product themselves, which the model predicts far too high."""
    return jnp.tanh(x @ (p[0] + p[1] @ p[2]))


SHAPES = jax.ShapeDtypeStruct
STACKS = {
    "no products": (wave, SHAPES((64, 64), jnp.float32), SHAPES((64, 64), jnp.float32)),
    "made weights": (
        adapted,
        [SHAPES(s, jnp.float32) for s in ((128, 128), (128, 4), (4, 128))],
        SHAPES((4, 128), jnp.float32),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_a_budget_of_zero_is_what_blocks_by_hand_need(name):
    layer, params, x = STACKS[name]

    def stack(layer):
        def loss(params, x):
            for p in params:
                x = layer(p, x)
            return jnp.sum(x**2)

        return loss

    args = [params] * 8, x
    by_hand = jax.jit(jax.value_and_grad(stack(jax.checkpoint(layer)))).lower(*args)
    plan = jrc.plan(stack(layer), *args, budget=0.0)
    assert plan.verified.peak_bytes <= memory_needed(by_hand).peak


def test_layers_of_very_different_widths_are_blocks():
    """Two activations in turn: all four blocks of two layers are found, and not one alone."""
    widths = [32, 512, 8, 256, 64, 512, 16, 128, 512]
    params = [
        jax.random.normal(jax.random.key(a), (a, b)) / a for a, b in itertools.pairwise(widths)
    ]
    x = jnp.ones((2048, 32))

    def stack(*layers):
        def loss(params, x):
            for w, layer in zip(params, itertools.cycle(layers)):
                x = layer(w, x)
            return jnp.mean((x - 1) ** 2)

        return loss

    layers = lambda w, x: jax.nn.gelu(x @ w), lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    problem = PlanningProblem.of(stack(*layers), (params, x), 0, False, "test")
    (every,) = [each for each in problem.by_hand if each.name == "every block recomputed"]
    assert sum(stage.region for stage in every.decision.stages) == 3
    plan = jrc.plan(stack(*layers), params, x, budget=0.0)
    by_hand = jax.jit(jax.grad(stack(*map(jax.checkpoint, layers)))).lower(params, x)
    assert plan.verified.peak_bytes < memory_needed(by_hand).peak


def test_pooling_is_no_part_of_a_block():
    loss, *args = unet(lambda fn: fn)
    program = unshared(Program(inline_all(jax.make_jaxpr(loss)(*args).jaxpr)))
    pools = {
        k
        for k, p in enumerate(program.steps)
        if program.eqns[p].primitive.name == "reduce_window_max"
    }
    problem = PlanningProblem.of(loss, tuple(args), 0, False, "test")
    (every,) = [each for each in problem.by_hand if each.name == "every block recomputed"]
    plain = {k for stage in every.decision.stages if not stage.region for k in stage.positions}
    assert len(pools) == 2
    assert pools <= plain


def test_two_stacks_of_layers_are_two_runs():
    kinds = "e" + "ab" * 4 + "c" + "xyz" * 3 + "h"
    assert sorted(repetitions(kinds)) == [(1, 2, 8), (10, 3, 9)]
    assert list(repetitions("abc")) == list(repetitions("")) == []


def test_the_head_is_recomputed_with_the_blocks():
    """Logits of all pairs need more than the blocks of both towers: a person wraps both."""

    def contrastive(wrap):
        block = wrap(lambda w, x: x + jax.nn.gelu(x @ w[0]) @ w[1])

        @wrap
        def head(x, y):
            logits = x @ y.T
            both = (jnp.diag(jax.nn.log_softmax(logits, axis)) for axis in (0, 1))
            return -jnp.mean(sum(both))

        def loss(params, x, y):
            for tower in params:
                for w in tower:
                    x = block(w, x)
                x, y = y, x
            return head(x, y)

        return loss

    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape) / 4  # noqa: E731
    params = [[(draw(i, 8, 32), draw(i, 32, 8)) for i in range(3)] for _ in range(2)]
    args = params, draw(8, 256, 8), draw(9, 256, 8)
    found = PlanningProblem.of(contrastive(lambda fn: fn), args, 0, False, "test")
    (way,) = [w for w in found.by_hand if w.name == "every block and the head recomputed"]
    assert found.all.index(way) in found.leanest
    by_hand = compiled_peak(contrastive(jax.checkpoint), *args)
    assert memory_needed(found.lowered(way)).peak <= by_hand


@pytest.mark.slow
def test_steps_between_blocks_are_recomputed_with_the_blocks():
    """Layers, and behind them logits chunk by chunk: a person wraps both."""

    def chunked(wrap):
        block = wrap(lambda w, x: x + jnp.tanh(x @ w[0]) @ w[1])

        def loss(params, x):
            for w in params[:-1]:
                x = block(w, x)
            chunk = wrap(lambda x: jnp.sum(jax.nn.logsumexp(x @ params[-1], -1)))
            return jnp.sum(jax.lax.map(chunk, x.reshape(8, -1, x.shape[-1])))

        return loss

    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape) / 4  # noqa: E731
    blocks = [(draw(i, 16, 64), draw(i, 64, 16)) for i in range(4)]
    args = [*blocks, draw(8, 16, 256)], draw(9, 512, 16)
    plain, wrapped = chunked(lambda fn: fn), chunked(jax.checkpoint)
    problem = PlanningProblem.of(plain, args, 0, False, "test")
    name = "every block recomputed, the last too, and every step"
    (way,) = [each for each in problem.by_hand if each.name == name]
    assert problem.all.index(way) in problem.leanest
    assert problem.flops + way.recomputed == problem.counted(way)
    assert problem.counted(way) == flops(jax.make_jaxpr(jax.value_and_grad(wrapped))(*args))
    assert memory_needed(problem.lowered(way)).peak <= compiled_peak(wrapped, *args)
    ours = problem.applied(way, plain)
    assert largest_error(*(jax.grad(fn)(*args) for fn in (ours, plain))) < 1e-5
    assert Plan.from_json(problem.plan_of(way, 1, {}).to_json()).decision == way.decision


@pytest.mark.slow
def test_steps_and_chunks_of_them_are_recomputed_with_the_blocks():
    """Layers, and behind them a recursion over many steps: the carries of all are too much."""

    def recursive(block_wrap, scan):
        block = block_wrap(lambda w, x: x + jnp.tanh(x @ w[0]) @ w[1])

        def loss(params, x):
            for w in params[:-1]:
                x = block(w, x)
            step = lambda a, s: (jax.nn.logsumexp(a[:, :, None] + params[-1][None], 1) + s, None)  # noqa: E731
            return jnp.mean(scan(step, x[0], x[1:]))

        return loss

    def chunks(step, carry, xs):
        inner = functools.partial(jax.lax.scan, jax.checkpoint(step, prevent_cse=False))
        parts = xs.reshape(8, -1, *xs.shape[1:])
        return jax.lax.scan(jax.checkpoint(inner, prevent_cse=False), carry, parts)[0]

    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape) / 4  # noqa: E731
    blocks = [(draw(i, 16, 32), draw(i, 32, 16)) for i in range(2)]
    args = [*blocks, draw(8, 16, 16)], draw(9, 65, 64, 16)
    plain = recursive(lambda fn: fn, lambda *given: jax.lax.scan(*given)[0])
    wrapped = recursive(jax.checkpoint, chunks)
    problem = PlanningProblem.of(plain, args, 0, False, "test")
    name = "every block recomputed, the last too, and every step, in chunks"
    (way,) = [each for each in problem.by_hand if each.name == name]
    assert memory_needed(problem.lowered(way)).peak <= 1.01 * compiled_peak(wrapped, *args)
    ours = problem.applied(way, plain)
    assert largest_error(*(jax.grad(fn)(*args) for fn in (ours, plain))) < 1e-5
    assert Plan.from_json(problem.plan_of(way, 1, {}).to_json()).decision == way.decision
