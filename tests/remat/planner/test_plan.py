"""Plans: gradients as without, and what is kept is kept, of functions of every kind."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import jrc
from jrc._jaxpr import primitive_name
from jrc.remat._planner.search.problem import PlanningProblem
from tests.remat.graphs import graphs
from tests.remat.measure import (
    bit_equal,
    compiled_products,
    largest_error,
    operators,
    rerun_operators,
    saved_bytes,
)
from tests.remat.planner.plan_cases import (
    CASES,
    KEY,
    WS,
    W,
    X,
    dropped,
    layers,
    mesh_of,
    problem_of,
    scanned,
)


def some_candidates(problem):
    """The leanest, and one in the middle."""
    count = len(problem.candidates)
    return [problem.candidates[i] for i in sorted({0, count // 2})]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_function(name):
    case, problem = CASES[name], problem_of(name)
    lean, *_ = ordered = some_candidates(problem)
    assert lean.decision is not None
    jitted = jax.jit(case.gradient(case.fn))(*case.args)
    recomputed = jax.jit(case.gradient(problem.applied(lean, case.fn)))(*case.args)
    assert jax.tree.structure(recomputed) == jax.tree.structure(jitted)
    assert largest_error(recomputed, jitted) < case.tolerance
    if case.exact:
        with jax.disable_jit():
            plain = case.gradient(case.fn)(*case.args)
            for candidate in ordered:
                recomputed = case.gradient(problem.applied(candidate, case.fn))(*case.args)
                assert bit_equal(recomputed, plain)


# By how much of all operations the count may be off, at these tiny sizes; elsewhere by nothing.
# Cotangents are added in another place, dead parts of a chunk or a branch are not run, complex
# numbers are kept in two parts.
OFF = {
    "skips": 0.03,
    "complexes": 0.17,
    "moving_data": 0.07,
    "branches": 0.04,
    "while_loops": 0.02,
    "nested_scans": 0.06,
    "loop with keys": 0.01,
    "loop with raw keys": 0.01,
    "sharded": 0.02,
    "resnet": 0.002,
} | dict.fromkeys((name for name in CASES if name.startswith("scan")), 0.03)
# The next remat runs a body inside of a chunk once more, and transposes results that are not read.
OFF_IN_REMAT3 = dict.fromkeys((name for name in CASES if name.startswith("scan")), 0.25) | {
    "what_the_user_wraps": 0.08,
    "dropout": 0.01,
    "dropout, raw key": 0.01,
    "aux_of_all_kinds": 0.16,
}


@pytest.mark.exhaustive_after(6)
@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_that_are_predicted(name):
    """What a plan says that it keeps is kept: else its makers would be counted again."""
    problem = problem_of(name)
    off = OFF | (OFF_IN_REMAT3 if jax.config.jax_remat3 else {})
    for candidate in some_candidates(problem):
        difference = problem.counted(candidate) - problem.predicted(candidate).flops
        assert abs(difference) <= off.get(name, 0) * problem.flops


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["wide batch", "skips", "custom_vjp", "dropout", "flax linen"])
def test_matrix_products_of_the_compiled_program(name):
    """As many more as the plan says: XLA has merged none, and a name alone holds nothing."""
    case, problem = CASES[name], problem_of(name)
    fn = lambda *args: case.fn(*args)[0] if case.has_aux else case.fn(*args)  # noqa: E731
    planned = lambda candidate: problem.applied(candidate, case.fn)  # noqa: E731
    candidate = problem.candidates[0]
    lean = lambda *args: planned(candidate)(*args)[0] if case.has_aux else planned(candidate)(*args)  # noqa: E731
    eqns = problem.program.eqns
    recomputed = sum(
        primitive_name(eqns[p]) == "dot_general"
        for stage in candidate.decision.stages
        for p in stage.recomputed
    )
    assert recomputed > 0
    assert compiled_products(lean, *case.args) == compiled_products(fn, *case.args) + recomputed


def test_kernels_run_again():
    """That a kernel writes its results is nothing that the world sees."""
    case, problem = CASES["kernels"], problem_of("kernels")
    plain, lean = (
        operators(case.gradient(fn), *case.args)["pallas_call"]
        for fn in (case.fn, problem.applied(problem.candidates[0], case.fn))
    )
    assert plain == len(WS) < lean


@given(graph=graphs(mark_all=False), data=st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_random_programs_rerun_what_the_plan_says(graph, data):
    """Gradients equal, and the operators that run twice are exactly those that are announced."""
    w, x = 0.3 * WS[0], 0.3 * X
    problem = PlanningProblem.of(graph, (w, x), (0, 1), False, "test")
    candidate = data.draw(st.sampled_from(problem.candidates))
    lean = problem.applied(candidate, graph)
    plain, recomputed = (jax.grad(f, argnums=(0, 1))(w, x) for f in (graph, lean))
    if all(bool(jnp.isfinite(g).all()) for g in plain):
        assert largest_error(recomputed, plain) < 1e-5
    eqns = problem.program.eqns
    stages = candidate.decision.stages if candidate.decision else ()
    names = [primitive_name(eqns[p]) for stage in stages for p in stage.recomputed]
    predicted = Counter(name for name in names if name != "mark")
    plain = functools.partial(graph, skip_dead=candidate.decision is not None)
    assert rerun_operators(lean, plain, w, x, argnums=(0, 1)) == predicted


def test_leaner_candidates_save_less():
    """The derivative saves less, candidate by candidate, and no more than is predicted."""
    problem = problem_of("layers tanh")
    sizes = [
        saved_bytes(problem.applied(candidate, layers), WS, X) for candidate in problem.candidates
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert all(
        a <= candidate.saved + 4 for a, candidate in zip(sizes, problem.candidates, strict=True)
    )


TRANSFORMS = {
    "hessian": lambda f: lambda ws, x: jax.hessian(lambda w: f([w, *ws[1:]], x))(ws[0]),
    "gradient of a gradient": lambda f: jax.grad(lambda ws, x: jnp.sum(jax.grad(f)(ws, x)[0] ** 2)),
    "jvp": lambda f: lambda ws, x: jax.jvp(lambda ws: f(ws, x), (ws,), (ws,)),
    "vmap": lambda f: lambda ws, x: jax.vmap(jax.grad(f), (None, 0))(ws, jnp.stack([x, 2 * x])),
    "grad of vmap": lambda f: jax.grad(
        lambda ws, x: jnp.sum(jax.vmap(f, (None, 0))(ws, jnp.stack([x, 2 * x])))
    ),
    "grad of scan": lambda f: jax.grad(
        lambda ws, x: jax.lax.scan(lambda c, _: (c + f(ws, x * c), None), 1e-2, None, length=3)[0]
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name):
    transform = TRANSFORMS[name]
    for case in ("layers sin", "scan of twelve"):
        fn, problem = CASES[case].fn, problem_of(case)
        plain, *planned = (
            jax.jit(transform(f))(WS, X) for f in (fn, problem.applied(problem.candidates[0], fn))
        )
        assert all(largest_error(each, plain) < 2e-6 for each in planned)


def test_each_replica_under_vmap_draws_its_own_mask():
    problem = problem_of("dropout")
    keys = jax.random.split(KEY, 2)
    plain, planned = (
        jax.vmap(lambda key, f=f: f(WS, X, key)[1])(keys)
        for f in (dropped, problem.applied(problem.candidates[0], dropped))
    )
    assert bit_equal(plain == 0, planned == 0) and not bit_equal(plain[0] == 0, plain[1] == 0)


def closing(ws, x):
    """A loop and a branch that close over values, which are traced in another order with casts."""
    y = jnp.sin(x)
    c, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c * (y @ ws[0]) + ws[1]), None), x, None, length=9)
    c = jax.lax.cond(ws[0][0, 0] > 0, lambda: c @ ws[2], lambda: jnp.maximum(c, 0) + ws[2])
    return jnp.sum(jax.nn.relu(jax.checkpoint(lambda: jnp.sin(c @ ws[3]))() * 2))


def inside(fn, local, has_aux=False):
    """The gradient of a loss of one device's part; `local`: of weights that are cast beforehand."""

    def part(ws, x, *rest):
        if local:
            ws = jax.lax.pcast(ws, "data", to="varying")
        grads = jax.grad(fn, has_aux=has_aux)(ws, x, *rest)
        grads = grads[0] if has_aux else grads
        return jax.lax.psum(grads, "data") if local else grads

    def call(ws, x, *rest):
        specs = dict(in_specs=(P(), P("data"), *[P()] * len(rest)), out_specs=P())
        return jax.shard_map(part, mesh=mesh_of(2), **specs)(ws, x, *rest)

    return jax.jit(call)


INSIDE = ["custom_vjp", "integers_and_booleans", "dropout", "nested_scans", "what_the_user_wraps"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", [*INSIDE, "closing"])
def test_inside_of_shard_map(name):
    """A plan that was made outside, for one device's part, whether gradients are local or not."""
    if name == "closing":
        fn, rest, has_aux = closing, (), False
        problem = PlanningProblem.of(fn, (WS, X), 0, False, "test")
    else:
        case, problem = CASES[name], problem_of(name)
        fn, rest, has_aux = case.fn, case.args[2:], case.has_aux
    args = WS, jnp.concatenate([X, 2 * X]), *rest
    middle = problem.candidates[len(problem.candidates) // 2]
    for candidate, local in ((problem.candidates[0], False), (middle, True)):
        lean = problem.applied(candidate, fn)
        plain, planned = (inside(f, local, has_aux) for f in (fn, lean))
        assert largest_error(planned(*args), plain(*args)) < 1e-6
        before, after = (operators(f, *args) for f in (plain, planned))
        sends = [op for op in before | after if op.startswith("psum")]
        assert sends and all(after[op] == before[op] for op in sends)
        # What is run again in there is what is run again outside.
        outside = [operators(jax.grad(f, has_aux=has_aux), WS, X, *rest) for f in (fn, lean)]
        for op in ("dot_general", "tanh", "sin"):
            assert after[op] - before[op] == outside[1][op] - outside[0][op]


def test_a_value_that_is_cast_once_is_cast_once():
    """By hand, for all its readers: where that is differentiated, devices send."""

    def shared(w, x, cast=lambda w: w):
        w = cast(w)
        for _ in range(4):
            x = jnp.tanh(jnp.sin(x @ w))
        return jnp.sum(x)

    vary = lambda w: jax.lax.pcast(w, "data", to="varying")  # noqa: E731
    problem = PlanningProblem.of(shared, (W, X), 0, False, "test")
    lean = problem.applied(problem.candidates[0], functools.partial(shared, cast=vary))
    assert len(problem.candidates[0].decision.stages) > 1
    args = W, jnp.concatenate([X, 2 * X])
    plain, planned = (inside(f, False) for f in (functools.partial(shared, cast=vary), lean))
    assert operators(planned, *args)["psum_invariant"] == 1
    assert largest_error(planned(*args), plain(*args)) < 1e-6


def around(ws, x):
    """A body that sends over the axis, and in which JAX casts values and numbers."""

    def body(ws, x):
        return jax.lax.psum(closing(ws, jnp.sin(x * 2)) + jnp.sum(jnp.clip(x, 0, 1) * 3), "data")

    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    return jax.shard_map(body, mesh=mesh_of(2), **specs)(ws, x)


def test_a_plan_around_a_shard_map_goes_into_it():
    args = WS, jnp.concatenate([X, 2 * X])
    problem = PlanningProblem.of(around, args, 0, False, "test")
    (lean, *_) = problem.candidates
    assert lean.recomputed > 0 and any(stage.inside for stage in lean.decision.stages)
    lean = problem.applied(lean, around)
    got, wanted = (jax.jit(jax.grad(f))(*args) for f in (lean, around))
    assert largest_error(got, wanted) < 1e-6
    before, after = (operators(jax.grad(f), *args) for f in (around, lean))
    assert before["psum_invariant"] == after["psum_invariant"] > 0


def test_collectives_and_what_a_tag_keeps_are_not_run_again():
    case, problem = CASES["sharded"], problem_of("sharded")
    plain = operators(jax.grad(case.fn), *case.args)
    for candidate in some_candidates(problem):
        lean = operators(jax.grad(problem.applied(candidate, case.fn)), *case.args)
        sends = [name for name in plain | lean if name.startswith("psum")]
        assert sends and all(lean[name] == plain[name] for name in sends)


def looped_with(act):
    def loss(w, x):
        for _ in range(2):
            x = jnp.tanh(act(x) @ w)
        x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(act(c) @ w), None), x, None, length=9)
        return jnp.sum(x)

    return loss


def test_what_acts_on_the_world_acts_once(capfd):
    def show(x):
        jax.debug.print("seen {}", x[0, 0])
        return x

    told = []

    def tell(x):
        told.append(x)
        return np.zeros_like(x)

    def ask(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x + io_callback(tell, shape, jax.lax.stop_gradient(x))

    for act in (show, ask):
        loss = looped_with(act)
        problem = PlanningProblem.of(loss, (WS[0], X), 0, False, "test")
        lean = problem.applied(problem.candidates[0], loss)
        assert problem.candidates[0].recomputed > 0
        grads = [jax.jit(jax.grad(f))(WS[0], X) for f in (loss, lean)]
        assert largest_error(*grads) < 1e-6
        jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 2 * (2 + 9)
    assert len(told) == 2 * (2 + 9)


@pytest.mark.slow
def test_applied_where_nothing_is_compiled():
    """Loops too: under `disable_jit` JAX would trace them turn by turn, as another program."""
    case, problem = CASES["scan of twelve"], problem_of("scan of twelve")
    with jax.disable_jit():
        plain = case.gradient(case.fn)(*case.args)
        for candidate in some_candidates(problem):
            recomputed = case.gradient(problem.applied(candidate, case.fn))(*case.args)
            assert largest_error(recomputed, plain) < 1e-6


@pytest.mark.parametrize("fn", [lambda ws, x: jnp.float32(3.0), lambda ws, x: ws[0][0, 0]])
def test_functions_that_have_nothing_to_run_again(fn):
    plan = jrc.plan(fn, WS, X, budget="1MiB")
    assert not plan.reruns and "nothing is recomputed" in str(plan)
    assert bit_equal(jax.grad(plan.apply(fn))(WS, X), jax.grad(fn)(WS, X))


def test_a_loss_that_is_an_argument():
    plan = jrc.plan(lambda found: found["loss"], {"loss": jnp.float32(2.0)}, budget="1MiB")
    assert not plan.reruns and plan.unplanned_flops == 0


def shifted(ws, x):
    """Loops whose bodies do nothing but hand on."""
    before, rows = lax.scan(lambda c, row: (row, c), x[0], jnp.tanh(x @ ws[0]))
    _, recomputed = lax.scan(lambda c, _: (c, c), rows @ ws[1], None, length=3)
    return jnp.sum(jnp.sin(recomputed)) + jnp.sum(before)


def handed_on(ws, x):
    specs = dict(in_specs=P("data"), out_specs=P("data"))
    return layers(ws, jax.shard_map(lambda x: x, mesh=mesh_of(2), **specs)(jnp.tanh(x)))


def written_down(ws, x):
    """Through a `Ref`, inside of a loop."""
    sums = jax.new_ref(jnp.zeros(len(ws)))

    def body(x, i):
        x = jnp.sin(jnp.tanh(x @ ws[0]))
        sums[i] = jnp.sum(x)
        return x, None

    x, _ = lax.scan(body, x, jnp.arange(len(ws)))
    return jnp.sum(x) + jnp.sum(sums[...] ** 2)


@pytest.mark.parametrize("fn", [shifted, handed_on, written_down])
def test_bodies_of_a_rare_kind(fn):
    problem = PlanningProblem.of(fn, (WS, X), 0, False, "test")
    lean = problem.applied(problem.candidates[0], fn)
    assert largest_error(jax.jit(jax.grad(lean))(WS, X), jax.jit(jax.grad(fn))(WS, X)) < 1e-6


def test_a_loop_of_no_turns():
    fn = functools.partial(scanned, length=0)
    problem = PlanningProblem.of(fn, (WS, X), 0, False, "test")
    lean = problem.applied(problem.candidates[0], fn)
    assert largest_error(jax.jit(jax.grad(lean))(WS, X), jax.jit(jax.grad(fn))(WS, X)) < 1e-6


@pytest.mark.slow
@pytest.mark.exhaustive_after(1)
@pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False), reason="jax.checkpoint itself leaves its names behind"
)
@pytest.mark.parametrize("name", ["layers tanh", "scan of one", "dropout"])
def test_no_tracer_outlives_its_trace(name):
    case, problem = CASES[name], problem_of(name)
    lean = problem.applied(problem.candidates[0], case.fn)
    with jax.checking_leaks():
        jax.jit(case.gradient(lean)).lower(*case.args)


@jax.custom_vjp
def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def attention_forward(q, k, v):
    out = attention(q, k, v)
    return out, (q, k, v, out)


def attention_backward(kept, ct):
    q, k, v, _ = kept
    return jax.vjp(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, q, k, v)[1](ct)


attention.defvjp(attention_forward, attention_backward)


@pytest.mark.slow
def test_a_rule_that_keeps_its_own_result_is_kept_rather_than_run_again():
    def fn(ws, x):
        for w in ws:
            x = x + jnp.tanh(attention(x @ w, x @ w.T, jnp.sin(x) @ w) @ w)
        return jnp.sum(x**3)

    args = [jnp.eye(16) + 0.1 * i for i in range(4)], jnp.ones((64, 16))
    problem = PlanningProblem.of(fn, args, 0, False, "test")
    for candidate in problem.candidates:
        assert problem.counted(candidate) <= 1.1 * problem.predicted(candidate).flops
    # Attention stays, and what is recomputed is cheap.
    assert problem.predicted(problem.candidates[-3]).flops_ratio < 1.02
