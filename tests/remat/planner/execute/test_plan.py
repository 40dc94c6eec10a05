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
from jrc._jaxpr import flops, primitive_name
from jrc.remat._planner.execute.apply_decision import apply_decision
from jrc.remat._planner.plan.decision import Mapped, Stages, walk
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
    problem_of_case,
    scanned,
)
from tests.remat.planner.problems import (
    applied,
    gradient_of,
    lean_of,
    problem_of,
    program_of,
    row_of,
)


def some_options(problem):
    """The leanest that recomputes something, and one in the middle."""
    row = row_of(problem)
    return list(dict.fromkeys([lean_of(problem), row[len(row) // 2]]))


@pytest.mark.exhaustive(after=12)
@pytest.mark.slow(after=4)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_function(name):
    case, problem = CASES[name], problem_of_case(name)
    lean, *_ = ordered = some_options(problem)
    assert isinstance(lean.decision, Stages)
    jitted = jax.jit(case.gradient(case.fn))(*case.args)
    recomputed = jax.jit(case.gradient(applied(problem, lean)))(*case.args)
    assert jax.tree.structure(recomputed) == jax.tree.structure(jitted)
    assert largest_error(recomputed, jitted) < case.tolerance
    if case.exact:
        with jax.disable_jit():
            plain = case.gradient(case.fn)(*case.args)
            for option in ordered:
                recomputed = case.gradient(applied(problem, option))(*case.args)
                assert bit_equal(recomputed, plain)


# By how much of all operations the count may be off, at these tiny sizes; elsewhere by nothing.
# Cotangents are added in another place, dead parts of a segment or a branch are not run, complex
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
    "resnet": 0.003,
} | dict.fromkeys((name for name in CASES if name.startswith("scan")), 0.04)
# The next remat runs a body inside of a segment once more, and transposes results that nothing
# reads.
OFF_IN_REMAT3 = dict.fromkeys((name for name in CASES if name.startswith("scan")), 0.25) | {
    "what_the_user_wraps": 0.08,
    "dropout": 0.01,
    "dropout, raw key": 0.01,
    "aux_of_all_kinds": 0.16,
}


@pytest.mark.exhaustive(after=6)
@pytest.mark.slow(after=3)
@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_that_are_predicted(name):
    """What a plan says that it keeps is kept: else its makers would be counted again."""
    problem = problem_of_case(name)
    off = OFF | (OFF_IN_REMAT3 if jax.config.jax_remat3 else {})
    for option in some_options(problem):
        counted = flops(gradient_of(problem, option))
        difference = counted - problem.flops_of(option)
        assert abs(difference) <= off.get(name, 0) * problem.flops


def rerun_names(problem, option):
    """The primitives of the equations that an option runs again, outside of loops and the like."""
    program = program_of(problem)
    again = [p for region in option.stages.regions for p in region.recomputed]
    return [primitive_name(program.eqns[program.steps[p]]) for p in again]


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("name", ["wide batch", "skips", "custom_vjp", "dropout", "flax linen"])
def test_matrix_products_of_the_compiled_program(name):
    """As many more as the plan says: XLA has merged none, and a name alone holds nothing."""
    case, problem = CASES[name], problem_of_case(name)
    option = lean_of(problem)
    fn, lean = (
        (lambda *args, f=f: f(*args)[0]) if case.has_aux else f
        for f in (case.fn, applied(problem, option))
    )
    names = rerun_names(problem, option)
    recomputed = names.count("dot_general")
    assert recomputed > 0
    assert compiled_products(lean, *case.args) == compiled_products(fn, *case.args) + recomputed


def test_kernels_run_again():
    """That a kernel writes its results is nothing that the world sees."""
    case, problem = CASES["kernels"], problem_of_case("kernels")
    plain, lean = (
        operators(case.gradient(fn), *case.args)["pallas_call"]
        for fn in (case.fn, applied(problem, lean_of(problem)))
    )
    assert plain == len(WS) < lean


@given(graph=graphs(mark_all=False), data=st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_random_programs_rerun_what_the_plan_says(graph, data):
    """Gradients equal, and the operators that run twice are exactly those that are announced."""
    w, x = 0.3 * WS[0], 0.3 * X
    problem = problem_of(graph, (w, x), (0, 1))
    option = data.draw(st.sampled_from(row_of(problem)))
    lean = applied(problem, option)
    plain, recomputed = (jax.grad(f, argnums=(0, 1))(w, x) for f in (graph, lean))
    if all(bool(jnp.isfinite(g).all()) for g in plain):
        assert largest_error(recomputed, plain) < 1e-5
    is_planned = option is not problem.baseline
    names = rerun_names(problem, option) if is_planned else []
    predicted = Counter(name for name in names if name != "mark")
    plain = functools.partial(graph, skip_dead=is_planned)
    assert rerun_operators(lean, plain, w, x, argnums=(0, 1)) == predicted


def test_leaner_options_save_less():
    """The derivative saves less, option by option, and no more than is predicted."""
    problem = problem_of_case("layers sin")
    row = row_of(problem)
    sizes = [saved_bytes(applied(problem, option), WS, X) for option in row]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert all(a <= option.saved + 4 for a, option in zip(sizes, row, strict=True))


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


@pytest.mark.exhaustive(after=4)
@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name):
    transform = TRANSFORMS[name]
    for case in ("layers sin", "scan of twelve"):
        fn, problem = CASES[case].fn, problem_of_case(case)
        plain, *planned = (
            jax.jit(transform(f))(WS, X) for f in (fn, applied(problem, lean_of(problem)))
        )
        assert all(largest_error(each, plain) < 2e-6 for each in planned)


def test_each_replica_under_vmap_draws_its_own_mask():
    problem = problem_of_case("dropout")
    keys = jax.random.split(KEY, 2)
    plain, planned = (
        jax.jit(jax.vmap(lambda key, f=f: f(WS, X, key)[1]))(keys)
        for f in (dropped, applied(problem, lean_of(problem)))
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


@pytest.mark.exhaustive(after=2)
@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", [*INSIDE, "closing"])
def test_inside_of_shard_map(name):
    """A plan that was made outside, for one device's part, whether gradients are local or not."""
    if name == "closing":
        fn, rest, has_aux = closing, (), False
        problem = problem_of(fn, (WS, X))
    else:
        case, problem = CASES[name], problem_of_case(name)
        fn, rest, has_aux = case.fn, case.args[2:], case.has_aux
    args = WS, jnp.concatenate([X, 2 * X]), *rest
    row = row_of(problem)
    for option, local in ((lean_of(problem), False), (row[len(row) // 2], True)):
        lean = applied(problem, option)
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
    problem = problem_of(shared, (W, X))
    option = lean_of(problem)
    assert len(option.stages.regions) > 1
    signature = problem.function.signature
    lean = apply_decision(functools.partial(shared, cast=vary), option.whole, signature)
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
    problem = problem_of(around, args)
    option = lean_of(problem)
    assert not option.stages.regions
    assert any(isinstance(stage, Mapped) for stage in option.stages.stages)
    assert any(each.regions for _, each, _ in walk(program_of(problem), option.stages))
    lean = applied(problem, option)
    got, wanted = (jax.jit(jax.grad(f))(*args) for f in (lean, around))
    assert largest_error(got, wanted) < 1e-6
    before, after = (operators(jax.grad(f), *args) for f in (around, lean))
    assert before["psum_invariant"] == after["psum_invariant"] > 0


def test_collectives_and_what_a_tag_keeps_are_not_run_again():
    case, problem = CASES["sharded"], problem_of_case("sharded")
    plain = operators(jax.grad(case.fn), *case.args)
    for option in some_options(problem):
        lean = operators(jax.grad(applied(problem, option)), *case.args)
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
        problem = problem_of(loss, (WS[0], X))
        assert problem.front[0].stages.recomputes
        lean = applied(problem, problem.front[0])
        grads = [jax.jit(jax.grad(f))(WS[0], X) for f in (loss, lean)]
        assert largest_error(*grads) < 1e-6
        jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 2 * (2 + 9)
    assert len(told) == 2 * (2 + 9)


@pytest.mark.slow
def test_applied_where_nothing_is_compiled():
    """Loops too: under `disable_jit` JAX would trace them turn by turn, as another program."""
    case, problem = CASES["scan of twelve"], problem_of_case("scan of twelve")
    with jax.disable_jit():
        plain = case.gradient(case.fn)(*case.args)
        for option in some_options(problem):
            recomputed = case.gradient(applied(problem, option))(*case.args)
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


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("fn", [shifted, handed_on, written_down])
def test_bodies_of_a_rare_kind(fn):
    problem = problem_of(fn, (WS, X))
    lean = applied(problem, row_of(problem)[0])
    assert largest_error(jax.jit(jax.grad(lean))(WS, X), jax.jit(jax.grad(fn))(WS, X)) < 1e-6


def test_a_loop_of_no_turns():
    fn = functools.partial(scanned, length=0)
    problem = problem_of(fn, (WS, X))
    lean = applied(problem, row_of(problem)[0])
    assert largest_error(jax.jit(jax.grad(lean))(WS, X), jax.jit(jax.grad(fn))(WS, X)) < 1e-6


@pytest.mark.slow
@pytest.mark.exhaustive(after=1)
@pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False), reason="jax.checkpoint itself leaves its names behind"
)
@pytest.mark.parametrize("name", ["layers tanh", "scan of one", "dropout"])
def test_no_tracer_outlives_its_trace(name):
    case, problem = CASES[name], problem_of_case(name)
    lean = applied(problem, lean_of(problem))
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
    problem = problem_of(fn, args)
    for option in row_of(problem):
        predicted = problem.flops_of(option)
        assert flops(gradient_of(problem, option)) <= 1.1 * predicted
    # Attention stays, and what is recomputed is cheap.
    assert problem.flops_of(row_of(problem)[-3]) < 1.02 * problem.flops
