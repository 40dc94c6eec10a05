"""Plans are values: they compare, print, travel, and are refused where they do not belong."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc._text import flops_text
from tests.processes import run_python
from tests.remat.changed_json import changed_texts
from tests.remat.measure import (
    bit_equal,
)
from tests.remat.planner.plan_cases import (
    CASES,
    WS,
    X,
    guess,
    layers,
    problem_of_case,
)
from tests.remat.planner.problems import plan_as


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=4)
@pytest.mark.parametrize("name", ["layers tanh", "nested_scans", "sharded", "dropout", "gpt"])
def test_plans_survive_json(name):
    for option in (0, -1):
        plan = guess(name, option, compiled=True)
        assert plan.verified is not None
        text = plan.to_json()
        recomputed = jrc.Plan.from_json(text)
        assert recomputed == plan and hash(recomputed) == hash(plan)
        assert (
            recomputed.to_json() == text
            and str(recomputed) == str(plan)
            and repr(recomputed) == repr(plan)
        )
        json.loads(text, parse_constant=pytest.fail)
    # Where nothing is worth recomputing, there is the baseline alone.
    assert guess(name, 0) != guess(name, -1) or not problem_of_case(name).front


def test_a_plan_from_json_is_applied_as_the_plan_itself():
    case, plan = CASES["nested_scans"], guess("nested_scans")
    recomputed = jrc.Plan.from_json(plan.to_json())
    texts = [
        str(jax.make_jaxpr(case.gradient(p.apply(case.fn)))(*case.args)) for p in (plan, recomputed)
    ]
    assert re.sub("0x[0-9a-f]+", "", texts[0]) == re.sub("0x[0-9a-f]+", "", texts[1])


@pytest.mark.parametrize(
    "text",
    ["", "plan", "{}", "[]", "3", "null", '{"format": 1}', "[" * 10**5, None, 7],
)
def test_what_is_no_plan(text):
    with pytest.raises(
        ValueError, match=r"jrc\.Plan\.from_json: text must be what Plan.to_json writes, of format "
    ) as e:
        jrc.Plan.from_json(text)
    assert str(e.value).endswith(". Plan again with jrc.plan.")


def test_a_plan_of_another_version_is_refused():
    (made_by,) = re.findall('"format": "([^"]*)"', text := guess("layers sin").to_json())
    rule = f"of format '{made_by}', got format 'jrc.Plan/21 of jrc 99.0'. Plan again"
    with pytest.raises(ValueError, match=re.escape(rule)):
        jrc.Plan.from_json(text.replace(made_by, "jrc.Plan/21 of jrc 99.0"))


@pytest.mark.parametrize("name", ["layers tanh", "scan of twelve"])
def test_a_plan_that_was_changed_is_refused(name):
    plan = guess(name)
    assert jrc.Plan.from_json(json.dumps(json.loads(plan.to_json()), indent=2)) == plan
    for text in changed_texts(plan.to_json()):
        with pytest.raises(ValueError, match="jrc.Plan.from_json: text must be what Plan.to_json"):
            jrc.Plan.from_json(text)


def turned(ws, x):
    for w in ws:
        x = jnp.tanh(jnp.einsum("ij,kj->ik", x, w))
    return jnp.sum(x**2)


def wider(ws, x):
    return layers(ws, jnp.concatenate([x, x]))


def shared(ws, x):
    return layers([ws[0], ws[0], *ws[2:]], x)


@pytest.mark.parametrize(
    "fn, args, text",
    [
        (layers, (WS, X[:2]), "equation 0 was dot_general:float32(4,4), tanh:float32(4,4), "),
        (
            functools.partial(layers, x=X[:2]),
            (WS,),
            "made for 5 arrays as arguments and 0 that the fun",
        ),
        (
            functools.partial(layers, x=X[:2]),
            (WS,),
            "now there are 4 and 1. Arrays that a function closes over",
        ),
        (layers, ([*WS, WS[0]], X), "are 6 and 0: leaf 'ws/4' is not expected; equation"),
        # Of a function that calls its arguments otherwise, only what is more or less.
        (
            lambda weights, inputs: layers(weights, inputs),
            ([*WS, WS[0]], X),
            "are 6 and 0: leaf 'weights/4' is not expected; equation",
        ),
        (lambda x, ws: layers(ws, x), (X, WS[:3]), "are 4 and 0: leaf 'ws/3' is missing; eq"),
        (layers, (WS[:2], X), "are 3 and 0: leaves 'ws/2', 'ws/3' are missing; equation"),
        (
            layers,
            (WS, X[:2]),
            "'x' was float32[4,4], now it is float32[2,4]; ",
        ),
        (layers, ([*WS, WS[0]], X), "was nothing, now it is dot_general:float32(4,4), tanh:"),
        (
            CASES["layers sin"].fn,
            (WS, X),
            "1 was tanh:float32(4,4), now it is sin:float32(4,4) (an",
        ),
        (turned, (WS, X), "the same operators are joined in another way, work along other axes"),
        (wider, (WS, X), "now it is concatenate:float32(8,4), dot_general:float32(8,4)"),
        (shared, (WS, X), "the same operators are joined in another way, work along other axes"),
        (
            layers,
            ([w.astype("bfloat16") for w in WS], X.astype("bfloat16")),
            "dot_general:bfloat16",
        ),
    ],
)
def test_a_changed_program_is_refused(fn, args, text):
    plan = guess("layers tanh")
    with pytest.raises(ValueError, match=re.escape(text)) as info:
        plan.apply(fn)(*args)
    assert str(info.value).startswith("jrc.Plan.apply: this plan was made for another program than")
    assert str(info.value).endswith("with jrc.plan(fn, *args, budget=...).")
    with pytest.raises(TypeError, match="the argument must be a function, got str"):
        plan.apply("layers")


def test_an_array_of_a_weak_type_is_named():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w[0]) * w[1])

    weights = [WS[0], jnp.log(2.0)]
    plan = jrc.plan(loss, [WS[0], jax.ShapeDtypeStruct((), jnp.float32)], X, budget=1.0)
    plan.apply(loss)([WS[0], jnp.asarray(weights[1], jnp.float32)], X)
    with pytest.raises(ValueError, match=r"jnp\.log\(2\.0\) has a weak type"):
        plan.apply(loss)(weights, X)


def test_a_longer_loop_is_another_program():
    case = CASES["scan without xs"]
    fn = case.fn.func if isinstance(case.fn, functools.partial) else case.fn
    longer = functools.partial(fn, length=90, xs=False)
    with pytest.raises(ValueError, match="another program"):
        jax.grad(guess("scan without xs").apply(longer))(WS, X)


def test_arguments_may_be_bound():
    """Where an array comes from does not change a program."""
    x, plan = CASES["wide batch"].args[1], guess("wide batch")
    bound = functools.partial(layers, x=x)
    assert plan.reruns
    assert bit_equal(jax.grad(plan.apply(bound))(WS), jax.grad(plan.apply(layers))(WS, x))


def test_the_source_may_move():
    """A plan knows operators, not lines: the same program from elsewhere takes it."""

    def moved(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    lean = guess("layers tanh").apply(moved)
    assert bit_equal(jax.grad(lean)(WS, X), jax.grad(guess("layers tanh").apply(layers))(WS, X))


def test_a_plan_prints_as_a_table():
    plan = guess("nested_scans", compiled=True)
    head, *rows = str(plan).splitlines()
    assert re.fullmatch(
        r"peak [\d,.]+ KiB \(compiled; budget 1 B\), FLOPs 1\.\d{3} x those of the baseline",
        head,
    )
    assert rows[0].split() == ["saved", "values", "bytes"]
    assert "decision=" not in repr(plan)


def test_a_plan_that_recomputes_nothing_says_so():
    problem = problem_of_case("layers tanh")
    for option in problem.options:
        plan = plan_as(problem, option)
        assert plan.reruns == bool(option.cost)
        assert ("nothing is recomputed" in str(plan)) is not plan.reruns


def marked_layers(ws, x):
    for i, w in enumerate(ws):
        x = jrc.mark(jnp.tanh(x @ w), f"layer_{i}")
    return jnp.sum(x)


def test_a_plan_names_what_it_saves_by_mark():
    ws, x = [jnp.ones((16, 16))] * 6, jnp.ones((64, 16))
    plan = jrc.plan(marked_layers, ws, x, budget=0.5, verify=False, minimize="flops")
    names = {each.name for each in plan.kept}
    assert plan.reruns and names and names <= {f"layer_{i}" for i in range(6)}
    assert any(name in str(plan) for name in names)


def test_what_jax_traced_for_several_calls_has_the_line_of_its_call():
    """JAX traces `jnp.where` and the bits of a mask once, for the calls of all lines."""

    def loss(ws, x, key):
        for i, w in enumerate(ws):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = jnp.where(kept, jnp.tanh(x @ w), 0.0)
        return jnp.mean(jnp.where(x > 0, x, 0.5) ** 2)

    args = [jnp.ones((16, 16))] * 4, jnp.ones((64, 16)), jax.random.key(0)
    first = loss.__code__.co_firstlineno
    plan = jrc.plan(loss, *args, budget=0.5, verify=False, chunks=False)
    told = [each.name for each in plan.kept] + [each.change for each in plan.candidates]
    lines = set(re.findall(r"(lt|select_n):\(64,16\)@test_plan_value\.py:(\d+)", " ".join(told)))
    assert ("select_n", str(first + 3)) in lines and "unknown" not in " ".join(told)
    assert lines <= {("lt", str(first + 2)), *(("select_n", str(first + n)) for n in (3, 4))}


def test_the_candidates_say_why_this_plan():
    """A row from the leanest to the baseline, then manual plans: the cheapest that fits of all."""
    ws, x = [jnp.ones((16, 16))] * 6, jnp.ones((64, 16))
    plan = jrc.plan(marked_layers, ws, x, budget=0.6, minimize="flops", chunks=False)
    count = 1 + [each.name for each in plan.candidates].index("baseline")
    row, manual = plan.candidates[:count], plan.candidates[count:]
    (chosen,) = [each for each in plan.candidates if each.is_chosen]
    assert chosen.predicted == plan.predicted
    assert chosen.verified == plan.verified and plan.verified.peak_bytes <= plan.budget
    flops = [each.predicted.flops for each in row]
    assert flops == sorted(flops, reverse=True) and row[-1].predicted.flops_ratio == 1
    compiled = [each for each in plan.candidates if each.verified]
    # Equal programs, which have equal peaks, are compiled once.
    peaks = {each.verified.peak_bytes for each in compiled}
    assert len(peaks) <= plan.compilations <= len(compiled)
    assert all(
        each.verified.peak_bytes > plan.budget
        for each in compiled
        if each.predicted.flops < plan.predicted.flops
    )
    assert row[-1].change == "baseline" and any("layer_" in each.change for each in row)
    assert {"everything recomputed", "products saved"} <= {each.name for each in manual}
    assert jrc.Plan.from_json(plan.to_json()).candidates == plan.candidates
    shown = str(plan).splitlines()
    (line,) = [line for line in shown if line.strip().startswith(">")]
    place = f"{1 + row.index(chosen)} of {count}" if chosen in row else "manual"
    assert f"> {place}" in line and "~" not in line
    assert shown[-1].startswith("~ is in front of what is predicted") and max(map(len, shown)) <= 80


SCRIPT = """
import sys

class NoScipy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "scipy":
            raise ImportError(name)

sys.meta_path.insert(0, NoScipy())
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
import jrc

def loss(ws, x):
    x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(jnp.sin(c @ ws[0])), None), x, None, length=8)
    for w in ws:
        x = jnp.tanh(x @ w) + jax.nn.softmax(x)
    return jnp.sum(x)

args = [jnp.ones((4, 4))] * 4, jnp.ones((8, 4))
plan = jrc.plan(loss, *args, budget=0.3, verify=False)
again = jrc.Plan.from_json(plan.to_json())
jax.make_jaxpr(jax.grad(again.apply(loss)))(*args)
assert plan.reruns and again == plan
assert not any(name.partition(".")[0] == "scipy" for name in sys.modules)
print(plan.to_json())
"""


@pytest.mark.slow
def test_the_same_plan_in_every_process_and_without_scipy():
    first, second = (run_python(SCRIPT, PYTHONHASHSEED=seed) for seed in "12")
    assert first == second and jrc.Plan.from_json(first).reruns


def recomputing_scan(ws, x):
    x, _ = jrc.recompute_scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(ws))
    return jnp.sum(jnp.sin(x))


def recomputing_calls(ws, x):
    for w in ws:
        x = jrc.recompute(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w), x, w)
    return jnp.sum(x**2)


@pytest.mark.parametrize("fn", [recomputing_scan, recomputing_calls])
def test_what_the_baseline_recomputes_is_printed(fn):
    plan = jrc.plan(fn, WS, X, budget=1.0, verify=False)
    assert not plan.reruns and plan.predicted.flops_ratio == 1
    assert plan.baseline_recomputed == jrc.explain(fn, WS, X).rerun_flops > 0
    amount = flops_text(plan.baseline_recomputed)
    line = f"the baseline itself recomputes {amount}, inside of functions with a custom_vjp"
    assert line in str(plan).splitlines()
    assert jrc.Plan.from_json(plan.to_json()) == plan


def test_regions_that_stay_are_recomputed_in_the_baseline():
    def fn(ws, x):
        for w in ws:
            x = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x, w)
        return jnp.sum(x**2)

    opened, respected = (
        jrc.plan(fn, WS, X, budget=1.0, verify=False, respect_checkpoints=stay)
        for stay in (False, True)
    )
    assert opened.baseline_recomputed == 0
    assert respected.baseline_recomputed == jrc.explain(fn, WS, X).rerun_flops > 0
    assert "inside of functions with a custom_vjp or jax.checkpoint regions" in str(respected)


def test_a_plain_baseline_recomputes_nothing():
    plan = guess("nested_scans")
    assert plan.baseline_recomputed == 0 and "baseline itself" not in str(plan)
