"""A plan said by names: `Plan.names` and `Plan.policy`, and the recipes of the docs."""

import dataclasses
import functools
import importlib.util
import itertools
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jrc
from jrc._jaxpr import flops
from jrc.remat._planner.plan import cheapest_names
from jrc.remat._planner.plan.decision import LeftToJax, Region, Stages
from jrc.remat._planner.solver.option import Option, made
from tests.draws import normal
from tests.processes import run_python
from tests.remat.measure import largest_error, operators, saved_bytes
from tests.remat.planner.problems import applied, plan_as, problem_of

policies = jax.checkpoint_policies
KEY = jax.random.key(0)
WS = [normal(i, 64, 64, scale=0.2) for i in range(4)]
X = normal(4, 256, 64)
DOCS = pathlib.Path(jrc.__file__).parent.parent / "docs" / "plans_for_other_frameworks.md"


def block(x, w, name=checkpoint_name):
    up = name(jnp.sin(x) @ w, "up")
    return x + name(jnp.cos(up) @ w.T, "down")


def unrolled(policy=None, ws=None, x=None, wrap=True, name=checkpoint_name):
    run = functools.partial(block, name=name)
    run = jax.checkpoint(run, policy=policy) if wrap else run
    for w in ws:
        x = run(x, w)
    return jnp.sum(jnp.sin(jnp.sin(x @ ws[0]) @ ws[1]))


def scanned(policy=None, ws=None, x=None, wrap=True):
    run = jax.checkpoint(block, policy=policy) if wrap else block
    return jnp.sum(jax.lax.scan(lambda c, w: (run(c, w), None), x, jnp.stack(ws))[0] ** 2)


def with_policy(shape, policy=None, **kwargs):
    return lambda ws, x: shape(policy, ws, x, **kwargs)


def plans_of(fn, *args):
    return dict(plans_one_by_one(fn, *(args or (WS, X))))


def plans_one_by_one(fn, *args):
    """Every plan with its name or number, made when it is asked for."""
    problem = problem_of(fn, args)
    for i, each in enumerate(problem.options):
        yield each.name or i, plan_as(problem, each, 2**40)


@functools.cache
def plans_of_net(shape, wrap=True):
    """The plans of the blocks, each under `jax.checkpoint` or not."""
    return plans_of(with_policy(shape, wrap=wrap))


def said_by_names(shape):
    """The plans that names say: under their policy the function is what it is under the plan."""
    fn = with_policy(shape)
    said = [plan for plan in plans_of_net(shape).values() if not plan.by_name.lost]
    for plan in said:
        planned, named = plan.apply(fn), with_policy(shape, plan.policy())
        assert saved_bytes(named, WS, X) == saved_bytes(planned, WS, X)
        count = [operators(jax.grad(f), WS, X)["dot_general"] for f in (named, planned)]
        assert count[0] == count[1]
        assert (
            largest_error(jax.jit(jax.grad(named))(WS, X), jax.jit(jax.grad(planned))(WS, X)) < 1e-6
        )
    return said


@pytest.mark.slow
@pytest.mark.parametrize("shape", [unrolled, scanned])
def test_a_policy_saves_what_the_plan_saves(shape):
    assert ("up",) in {plan.names() for plan in said_by_names(shape)}


def test_what_jax_saves_of_one_equation_is_not_said_by_names():
    """In front of the first region, in a block of the user's, JAX saves a result as well."""

    def loss(ws, x, policy=None):
        run = jax.checkpoint(lambda x, w: jnp.cos(jnp.sin(x) @ w) @ w, policy=policy)
        return jnp.sum(run(run(x, ws[0]), ws[1]))

    problem = problem_of(loss, (WS, X))
    blocks = [Region((0, 1, 2, 3), ((3, 0),), (0, 1, 2), by_name=False)]
    blocks.append(Region((4, 5, 6, 7), ((7, 0),), (4, 5, 6), by_name=False))
    after_sin = Region((1, 2, 3), ((3, 0),), (1, 2), by_name=False)
    named = functools.partial(loss, policy=policies.nothing_saveable)
    for first, is_said in ((blocks[:1], True), ([LeftToJax((0,)), after_sin], False)):
        option = Option(0, 0, 0, made(Stages((*first, blocks[1], LeftToJax((8,))))))
        assert bool(plan_as(problem, option).by_name.lost) is not is_said
        planned = applied(problem, option)
        assert (saved_bytes(planned, WS, X) == saved_bytes(named, WS, X)) is is_said


def test_names_are_the_tags_that_are_saved():
    steps = plans_of_net(scanned)["every step recomputed"]
    assert steps.names() == () and steps.policy() is policies.nothing_saveable
    products = plans_of_net(unrolled)["products saved"]
    assert products.names(approximate=True) == ("up",)  # no derivative reads "down"
    again = jrc.Plan.from_json(products.to_json())
    assert again.by_name == products.by_name and again == products


def test_a_function_without_regions_is_one_region():
    def loss(ws, x, policy=None):
        def run(ws, x):
            for w in ws:
                x = checkpoint_name(jnp.sin(x @ w), "layer")
            return jnp.sum(jnp.sin(x))

        return jax.checkpoint(run, policy=policy)(ws, x) if policy else run(ws, x)

    said = [plan for plan in plans_of(loss).values() if plan.reruns and not plan.by_name.lost]
    assert any(plan.names() == ("layer",) for plan in said)
    for plan in said:
        named = functools.partial(loss, policy=plan.policy())
        planned = plan.apply(loss)
        assert saved_bytes(named, WS, X) == saved_bytes(planned, WS, X)


def test_the_baseline_saves_everything():
    plan = plans_of_net(unrolled)["baseline"]
    assert plan.policy() is policies.everything_saveable
    with pytest.raises(ValueError, match="nothing is recomputed"):
        plan.names()


def refusal(plan, method="policy"):
    with pytest.raises(ValueError, match=f"jrc.Plan.{method}: the plan must be one") as error:
        getattr(plan, method)()
    return str(error.value)


@pytest.mark.slow
def test_what_names_lose_is_said():
    plans = plans_of_net(unrolled)
    assert "own policies" in refusal(plans["your jax.checkpoint as written"])
    everything = refusal(plans["everything recomputed"])
    assert "outside of your regions" in everything and "approximate=True" in everything
    middle = [plan.by_name.lost for plan in plans.values()]
    assert any(re.search(r"of 'up' .* are saved, .* not", "; ".join(lost)) for lost in middle)

    def untagged(ws, x):
        return unrolled(ws=ws, x=x, name=lambda x, _: x)

    lost = refusal(plans_of(untagged)["products saved"], "names")
    assert "dot_general" in lost and "without a name" in lost
    long = plans_of(with_policy(scanned), [*WS, *WS], X)  # of eight steps, some plans have segments
    segments = [plan.by_name.lost for plan in long.values()]
    assert any("segments" in text for lost in segments for text in lost)
    bare = [p.by_name.lost for p in plans_of_net(scanned, wrap=False).values()]
    assert any("no jax.checkpoint around" in text for lost in bare for text in lost)


def test_marks_of_this_package_are_names_but_no_policy_sees_them():
    def loss(ws, x):
        for w in ws:
            x = jrc.mark(jnp.sin(x @ w), "layer")
        return jnp.sum(jnp.sin(x))

    plan = next(p for p in plans_of(loss).values() if p.by_name.names and not p.by_name.lost)
    assert plan.names() == ("layer",)
    assert "jrc.mark" in refusal(plan)
    assert plan.policy(approximate=True) is policies.nothing_saveable


def test_approximate_is_a_flag():
    plan = plans_of_net(unrolled)["products saved"]
    with pytest.raises(TypeError, match="approximate"):
        plan.policy(approximate="yes")
    assert callable(plan.policy(approximate=True))


# A decoder layer as in Llama: batch, sequence, width, heads, width of the MLP, layers.

B, S, D, H, F, L = 2, 64, 64, 4, 176, 8
WIDTHS = {"q": D, "k": D, "v": D, "scores": H * S, "attention": D, "out": D, "gate": F, "up": F}
"""The tags that a derivative reads, and entries of each for a position; `down` is read by none."""


def decoder_layer(x, w):
    def heads(y):
        return y.reshape(B, S, H, D // H).transpose(0, 2, 1, 3)

    def normed(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale[None, None]

    h = normed(x, w["norms"][0])
    q, k, v = (checkpoint_name(heads(h @ w[name]), name) for name in "qkv")
    scores = checkpoint_name(jnp.einsum("bhtd,bhsd->bhts", q, k) / 4.0, "scores")
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores), v)
    mixed = checkpoint_name(mixed.transpose(0, 2, 1, 3).reshape(B, S, D), "attention")
    x = x + checkpoint_name(mixed @ w["out"], "out")
    h = normed(x, w["norms"][1])
    gate, up = (checkpoint_name(h @ w[name], name) for name in ("gate", "up"))
    return x + checkpoint_name((jax.nn.silu(gate) * up) @ w["down"], "down")


def decoder(ws, x, policy=None, unroll=False):
    run = jax.checkpoint(decoder_layer, policy=policy)
    if unroll:
        for i in range(2):
            x = run(x, {name: w[i] for name, w in ws.items()})
    else:
        x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, ws)
    return jnp.sum(x**2)


def decoder_args():
    shapes = {name: (D, D) for name in ("q", "k", "v", "out")}
    shapes |= {"gate": (D, F), "up": (D, F), "down": (F, D), "norms": (2, D)}
    ws = {name: jnp.ones((L, *shape)) for name, shape in shapes.items()}
    return ws, jnp.ones((B, S, D))


def flops_by_names(fn, names):
    run = functools.partial(fn, policy=policies.save_only_these_names(*names))
    return flops(jax.make_jaxpr(jax.value_and_grad(run))(*decoder_args()).jaxpr)


def best_flops(fn, most):
    """The fewest FLOPs of all sets of tags of at most so many entries for a position."""
    sets = [set(each) for n in range(len(WIDTHS) + 1) for each in itertools.combinations(WIDTHS, n)]
    fitting = [each for each in sets if sum(map(WIDTHS.get, each)) <= most]
    # To save more never costs FLOPs.
    largest = [each for each in fitting if not any(each < other for other in fitting)]
    return min(flops_by_names(fn, each) for each in largest)


def check_nearest_names(fn, plan, most=0):
    """No set of so many entries for a position, or of a tenth more, costs 1 % fewer FLOPs."""
    names = plan.names(approximate=True)
    assert plan.by_name.lost and 1 < len(names) < len(WIDTHS)
    most = max(most, 1.1 * sum(WIDTHS.get(name, 0) for name in names))
    assert flops_by_names(fn, names) <= 1.01 * best_flops(fn, most)


@pytest.mark.slow
@pytest.mark.parametrize("most_in_all_sets", [12, 0])
def test_the_nearest_names_are_those_of_fewest_flops(most_in_all_sets, monkeypatch):
    """Whether all sets of tags are compared, or tags are left out one by one."""
    settings = dataclasses.replace(cheapest_names.SETTINGS, tags_in_all_sets=most_in_all_sets)
    monkeypatch.setattr(cheapest_names, "SETTINGS", settings)
    plan = jrc.plan(decoder, *decoder_args(), budget=0.5, verify=False)
    bare = functools.partial(decoder, policy=policies.nothing_saveable)
    entries = (plan.saved_bytes - saved_bytes(bare, *decoder_args())) // X.itemsize
    check_nearest_names(decoder, plan, entries // (L * B * S))


@pytest.mark.exhaustive
def test_the_nearest_names_of_layers_without_a_loop():
    fn = functools.partial(decoder, unroll=True)
    lossy = (plan for _, plan in plans_one_by_one(fn, *decoder_args()) if plan.by_name.lost)
    check_nearest_names(fn, next(plan for plan in lossy if 1 < len(plan.by_name.names) < 6))


@pytest.mark.exhaustive
def test_the_nearest_names_take_about_the_bytes_of_the_plan():
    found = 0
    bare = functools.partial(decoder, policy=policies.nothing_saveable)
    least = saved_bytes(bare, *decoder_args())
    for plan in plans_of(decoder, *decoder_args()).values():
        if isinstance(plan.decision, Stages) and plan.by_name.lost:
            named = functools.partial(decoder, policy=plan.policy(approximate=True))
            more = saved_bytes(named, *decoder_args()) - least
            assert more <= 1.1 * plan.saved_bytes
            found += more > 0
    assert found > 3


# The recipes of docs/plans_for_other_frameworks.md. `plan` is one that saves "up".


def nearest():
    return plans_of_net(unrolled)["products saved"]


def test_recipe_flax():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            up = checkpoint_name(nn.Dense(64)(x), "up")
            return x + nn.Dense(64)(jnp.sin(up))

    class Net(nn.Module):
        policy: object = None

        @nn.compact
        def __call__(self, x):
            for i in range(4):
                x = nn.remat(Block, policy=self.policy)(name=f"block_{i}")(x)
            return x

    params = Net().init(KEY, X)

    def loss(params, x, policy=None):
        return jnp.sum(Net(policy).apply(params, x) ** 2)

    plan = plans_of(loss, params, X)["marks saved"]
    named = functools.partial(loss, policy=plan.policy(approximate=True))
    assert "up" in plan.names(approximate=True)
    more = saved_bytes(named, params, X) - saved_bytes(loss, params, X)
    assert more == 4 * X.nbytes


def test_recipe_nnx():
    layers = [nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(3)]

    def loss(layers, x, policy=None):
        run = nnx.remat(lambda layer, x: jnp.sin(checkpoint_name(layer(x), "up")), policy=policy)
        for layer in layers:
            x = run(layer, x)
        return jnp.sum(x)

    plan = plans_of(loss, nnx.List(layers), X)["products saved"]
    policy = plan.policy(approximate=True)
    grads = nnx.grad(functools.partial(loss, policy=policy))(nnx.List(layers), X)
    plain = nnx.grad(loss)(nnx.List(layers), X)
    assert largest_error(nnx.to_tree(grads), nnx.to_tree(plain)) < 1e-6


def test_recipe_maxtext():
    settings = ["remat_policy=custom", *(f"{n}=device" for n in nearest().names(approximate=True))]
    assert sorted(settings) == ["remat_policy=custom", "up=device"]


def test_recipe_big_vision(monkeypatch):
    """What takes the name of one of JAX's policies finds one of ours under a name of its own."""
    policy = nearest().policy(approximate=True)
    monkeypatch.setattr(jax.checkpoint_policies, "jrc_plan", policy, raising=False)
    found = getattr(jax.checkpoint_policies, "jrc_plan", None)
    one, other = (saved_bytes(with_policy(unrolled, each), WS, X) for each in (found, policy))
    assert one == other > saved_bytes(with_policy(unrolled), WS, X)


def test_recipe_haliax():
    haliax = pytest.importorskip("haliax", exc_type=ImportError)
    plan = nearest()
    policy = haliax.ScanCheckpointPolicy(
        save_carries=True, save_block_internals=list(plan.names(approximate=True))
    )
    assert policy.save_block_internals == list(plan.names(approximate=True))


KERAS = """
import jax, jax.numpy as jnp, keras
from jax.ad_checkpoint import checkpoint_name
import jrc
from tests.remat.planner.plan.test_plan_policy import plans_of
from tests.remat.measure import saved_bytes

class Block(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = keras.layers.Dense(64)

    def call(self, x):
        return keras.ops.sin(checkpoint_name(keras.ops.sin(self.up(x)), self.name))

def model(names):
    keras.utils.clear_session()
    x = inputs = keras.Input((64,))
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        for i in range(4):
            x = Block(name=f"block_{i}")(x)
        return keras.Model(inputs, x)

def loss_of(net):
    state = [v.value for v in net.trainable_variables]
    return lambda params, x: jnp.sum(net.stateless_call(params, [], x)[0]), state

x = jnp.ones((32, 64))
loss, params = loss_of(model([]))
plan = plans_of(loss, params, x)["marks saved"]
assert plan.names(approximate=True) == tuple(f"block_{i}" for i in range(4)), plan.by_name
names = [f"block_{i}" for i in range(4)]
lean, _ = loss_of(model([n for n in names if n not in names[:2]]))
all_, _ = loss_of(model(names))
assert saved_bytes(all_, params, x) < saved_bytes(lean, params, x) < saved_bytes(loss, params, x)
assert plans_of(all_, params, x)["your jax.checkpoint as written"].reruns
"""


@pytest.mark.exhaustive
def test_recipe_keras():
    if importlib.util.find_spec("keras") is None:  # an import would ask for TensorFlow
        pytest.skip("keras is not installed: it is in the extra `zoo`")
    run_python(KERAS, KERAS_BACKEND="jax")


@pytest.mark.exhaustive
def test_with_the_next_remat():
    code = """
import jax
from tests.remat.planner.plan import test_plan_policy as t
assert jax.config.jax_remat3
t.test_a_policy_saves_what_the_plan_saves(t.scanned)
t.test_recipe_big_vision(__import__("pytest").MonkeyPatch())
"""
    run_python(code, JAX_REMAT3="1")


def test_every_recipe_stands_in_the_docs():
    text = DOCS.read_text()
    for word in (
        "remat_policy=custom",
        "ScanCheckpointPolicy(",
        "gradient_checkpointing_targets",
        "jax.checkpoint_policies.jrc_plan",
        "RematScope(",
        "nn.remat(",
        "nnx.remat(",
    ):
        assert word in text, word
