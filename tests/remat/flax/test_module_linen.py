"""flax linen modules as regions: equal parameters and results, fewer saved bytes."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jrc
from tests.remat.measure import bit_equal, largest_error, rerun_operators, saved_bytes

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Block(nn.Module):
    features: int = 8

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = jnp.sin(nn.Dense(self.features, use_bias=False)(x))
        return nn.Dense(self.features, use_bias=False)(x)


class Full(nn.Module):
    """All kinds of state and arguments: statistics, masks, sown values, a cache, a mode."""

    features: int = 8

    @nn.compact
    def __call__(self, x, train, *, tag="t", scale=None):
        h = jnp.sin(nn.Dense(self.features)(x))
        h = nn.BatchNorm(use_running_average=not train)(h)
        h = nn.Dropout(0.5, deterministic=not train)(h)
        self.sow("intermediates", "h", h)
        calls = self.variable("cache", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += 1
        h = self.perturb("p", nn.Dense(self.features)(h * (1 if scale is None else scale)))
        return {"out": h, "mask": h == 0, "rest": (tag, None)}


class Net(nn.Module):
    block: type = Block
    args: tuple = ()

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = self.block(8)(x, *self.args)
            x = x["out"] if isinstance(x, dict) else x
        return x


def losses(module, recomputed, x=X):
    """Return the plain and the recomputed loss of parameters, and first parameters."""
    variables = module.init(KEYS, x)
    assert bit_equal(recomputed.init(KEYS, x), variables)

    def loss(module, variables):
        return jnp.sum(module.apply(variables, x) ** 2)

    return functools.partial(loss, module), functools.partial(loss, recomputed), variables


def equal_gradients(plain, recomputed, variables):
    with jax.disable_jit():
        assert bit_equal(jax.grad(recomputed)(variables), jax.grad(plain)(variables))
    assert largest_error(*(jax.jit(jax.grad(f))(variables) for f in (recomputed, plain))) < 1e-6


def dots(loss, variables):
    text = jax.jit(jax.grad(loss)).lower(variables).compile().as_text()
    return text.count(" dot(")


def test_all_inside_is_recomputed_and_the_output_is_saved():
    plain, recomputed, variables = losses(Net(), Net(jrc.recompute_module(Block)))
    assert list(variables["params"]) == ["Block_0", "Block_1", "Block_2"]
    equal_gradients(plain, recomputed, variables)
    # The last dot of each block makes its output, which is saved.
    assert rerun_operators(recomputed, plain, variables) == Counter(dot_general=6, sin=6)
    assert saved_bytes(recomputed, variables) < saved_bytes(plain, variables) / 3
    assert dots(recomputed, variables) == dots(plain, variables) + 6


def test_instances_keep_fields_name_and_parent():
    block = jrc.recompute_module(Block(8, name="mine"))
    assert isinstance(block, Block) and block.name == "mine" and block.features == 8
    assert type(block).__name__ == "Block" and repr(block) == repr(Block(8, name="mine"))
    plain, recomputed, variables = losses(Block(), jrc.recompute_module(Block()))
    equal_gradients(plain, recomputed, variables)
    assert rerun_operators(recomputed, plain, variables) == Counter(dot_general=2, sin=2)


def test_recomputing_twice_is_recomputing_once():
    once = jrc.recompute_module(Block)
    assert jrc.recompute_module(once) is once is jrc.recompute_module(Block)
    block = once(8)
    assert jrc.recompute_module(block) is block
    assert type(jrc.recompute_module(Block(8))) is once
    twice = jrc.recompute_module(jrc.recompute_module(Block()))
    plain, recomputed, variables = losses(Block(), twice)
    assert rerun_operators(recomputed, plain, variables) == Counter(dot_general=2, sin=2)
    # Other options replace the old ones.
    assert jrc.recompute_module(once, methods=["setup"]).__call__ is Block.__call__
    assert jrc.recompute_module(jrc.recompute_module(once, methods=["setup"])) is once


@pytest.mark.slow
def test_state_once_same_masks_and_whole_results():
    """Two gradient steps with every collection mutable, against the plain module."""
    wanted = Net(Full, (True,)).init(KEYS, X)
    recomputed = Net(jrc.recompute_module(Full), (True,))
    assert bit_equal(recomputed.init(KEYS, X), wanted)

    def loss(module, params, rest, key):
        y, state = module.apply(
            {"params": params, **rest}, X, rngs={"dropout": key}, mutable=[*rest, "intermediates"]
        )
        return jnp.sum(y**2), state

    params = wanted.pop("params")
    for i in range(2):
        steps = []
        for module in (recomputed, Net(Full, (True,))):
            step = jax.value_and_grad(functools.partial(loss, module), has_aux=True)
            with jax.disable_jit():
                steps.append(step(params, wanted, jax.random.key(i)))
        assert bit_equal(*steps)
        wanted = steps[0][0][1]
    assert wanted["cache"]["Full_2"]["calls"] == 3
    assert len(wanted["intermediates"]["Full_0"]["h"]) == 2
    frozen = [m.apply({"params": params, **wanted}, X, mutable=["cache"])[0] for m in
              (Net(jrc.recompute_module(Full), (False,)), Net(Full, (False,)))]  # fmt: skip
    assert largest_error(*frozen) < 1e-6


def test_plain_python_needs_no_static_arguments():
    full = jrc.recompute_module(Full)()
    variables = full.init(KEYS, X, True)
    apply = functools.partial(full.apply, variables, mutable=["cache", "batch_stats"], rngs=KEYS)

    @jax.jit
    def run(x):
        names_in, _ = apply(x, train=True, tag="named", scale=jnp.float32(2))
        placed, _ = apply(x, False)
        assert names_in["rest"] == ("named", None) and placed["rest"] == ("t", None)
        return names_in["out"], names_in["mask"], placed["out"]

    def plain(x):
        call = functools.partial(
            Full().apply, variables, mutable=["cache", "batch_stats"], rngs=KEYS
        )
        names_in, placed = call(x, train=True, scale=jnp.float32(2))[0], call(x, train=False)[0]
        return names_in["out"], names_in["mask"], placed["out"]

    (names_in, mask, placed), (a, b, c) = run(X), jax.jit(plain)(X)
    assert mask.dtype == bool and bit_equal(mask, b)
    assert (
        largest_error((names_in, placed), (a, c)) < 1e-6 and largest_error(names_in, placed) > 0.1
    )


def test_arrays_stay_concrete_on_demand():
    class Repeat(nn.Module):
        @nn.compact
        def __call__(self, x, times):
            for _ in range(int(times)):
                x = jnp.sin(nn.Dense(8)(x))
            return x

    times, params = jnp.int32(2), Repeat().init(KEYS, X, 2)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jrc.recompute_module(Repeat)().apply(params, X, times)
    for static in (1, [1]):
        recomputed = jrc.recompute_module(Repeat, static_argnums=static)()
        got, want = recomputed.apply(params, X, times), Repeat().apply(params, X, 2)
        assert largest_error(got, want) < 1e-6


class Deep(nn.Module):
    """Layers by `nn.scan`, in one of three forms."""

    form: str

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, train):
                x = nn.Dropout(0.5, deterministic=not train)(jnp.sin(nn.Dense(8)(x)))
                return nn.Dense(8)(x), None

        recompute_module = jrc.recompute_module
        inner = recompute_module(Layer) if self.form == "inner" else Layer
        scan = nn.scan(
            inner,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=3,
        )
        x, _ = (recompute_module(scan) if self.form == "outer" else scan)()(x, True)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("form", ["inner", "outer"])
def test_scanned_layers(form):
    variables = Deep("none").init(KEYS, X)
    assert bit_equal(Deep(form).init(KEYS, X), variables)
    (name,) = variables["params"]
    assert name.startswith("ScanLayer") and variables["params"][name]["Dense_0"]["bias"].ndim == 2

    def loss(module, variables):
        y = module.apply(variables, X, rngs=KEYS)
        return jnp.sum(y**2)

    plain, recomputed = (functools.partial(loss, Deep(f)) for f in ("none", form))
    assert largest_error(jax.grad(recomputed)(variables), jax.grad(plain)(variables)) < 1e-6
    # One dot per layer is recomputed; with the region around the scan, one operator, both are.
    more = rerun_operators(recomputed, plain, variables)
    assert more["random_bits"] == 3 and more["dot_general"] == (3 if form == "inner" else 6)
    assert saved_bytes(recomputed, variables) < saved_bytes(plain, variables)


def test_mapped_layers():
    lift = functools.partial(
        nn.vmap, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0
    )
    x = jnp.stack([X, 2 * X])
    for inside in (True, False):
        recompute_module = jrc.recompute_module
        recomputed = lift(recompute_module(Block))() if inside else recompute_module(lift(Block))()
        plain, recomputed, variables = losses(lift(Block)(), recomputed, x)
        assert largest_error(jax.grad(recomputed)(variables), jax.grad(plain)(variables)) < 1e-6
        assert rerun_operators(recomputed, plain, variables) == Counter(dot_general=2, sin=2)


def test_shared_and_nested_modules():
    class Shared(nn.Module):
        block: type
        whole: nn.Module

        @nn.compact
        def __call__(self, x):
            block = self.block()
            return self.whole(block(block(self.whole(x))))

    recompute_module = jrc.recompute_module
    recomputed = Shared(recompute_module(Block), recompute_module(Net(recompute_module(Block))))
    plain, recomputed, variables = losses(Shared(Block, Net()), recomputed)
    assert sorted(variables["params"]) == ["Block_0", "whole"]
    assert largest_error(jax.grad(recomputed)(variables), jax.grad(plain)(variables)) < 1e-6
    # Two calls of a block; two calls of a net, which recomputes its three blocks (three dots, two
    # sines each) once, except the dot that is its result.
    predicted = Counter(dot_general=2 * 2 + 2 * (3 * 3 - 1), sin=2 * 2 + 2 * 3 * 2)
    assert rerun_operators(recomputed, plain, variables) == predicted


class Coder(nn.Module):
    """The setup style, with several methods, one of which calls another."""

    recompute: bool = False

    def setup(self):
        block = Block()
        self.inner = jrc.recompute_module(block) if self.recompute else block
        self.head = nn.Dense(8, use_bias=False)

    def encode(self, x):
        return self.inner(jnp.sin(self.head(x)))

    def decode(self, x):
        return self.head(jnp.sin(self.head(x)))

    def __call__(self, x):
        return self.decode(self.encode(x))


def test_setup_style_and_other_methods():
    plain, recomputed, variables = losses(Coder(), Coder(recompute=True))
    assert sorted(variables["params"]) == ["head", "inner"]
    equal_gradients(plain, recomputed, variables)
    assert rerun_operators(recomputed, plain, variables) == Counter(dot_general=2, sin=2)

    both = jrc.recompute_module(Coder, methods=["decode", "__call__"])()
    plain, recomputed, variables = losses(Coder(), both)
    assert largest_error(jax.grad(recomputed)(variables), jax.grad(plain)(variables)) < 1e-6
    # A method that is called inside a region is part of it, and is recomputed once.
    assert rerun_operators(recomputed, plain, variables) == Counter(dot_general=5, sin=4)

    def loss(module, variables):
        return jnp.sum(module.apply(variables, X, method="decode") ** 2)

    recomputed, plain = (functools.partial(loss, module) for module in (both, Coder()))
    assert rerun_operators(recomputed, plain, variables) == Counter(dot_general=1, sin=1)


def test_instances_that_are_bound_already():
    class Parent(nn.Module):
        recompute: bool

        @nn.compact
        def __call__(self, x):
            block = Block(name="b")
            inner = jrc.recompute_module(block) if self.recompute else block
            return inner(block(x))

    plain, recomputed, variables = losses(Parent(False), Parent(True))
    assert list(variables["params"]) == ["b"]
    assert largest_error(jax.grad(recomputed)(variables), jax.grad(plain)(variables)) < 1e-6
    assert rerun_operators(recomputed, plain, variables) == Counter(dot_general=2, sin=2)

    class Holder(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.inner(x)

    params = Holder(Block()).init(KEYS, X)
    bound = jrc.recompute_module(Holder(Block()).bind(params))
    assert largest_error(bound(X), Holder(Block()).apply(params, X)) < 1e-6


def test_subclasses_and_partials():
    class Wide(jrc.recompute_module(Block)):
        gain: float = 1.0

        def __call__(self, x):
            return self.gain * super().__call__(x)

    variables = Block().init(KEYS, X)
    wide, block = (m.apply(variables, X) for m in (Wide(gain=2.0), Block()))
    assert largest_error(wide, 2 * block) < 1e-6
    partial = jrc.recompute_module(functools.partial(Block, features=4))
    assert partial.func is jrc.recompute_module(Block)
    assert partial().init(KEYS, X)["params"]["Dense_0"]["kernel"].shape == (8, 4)


def test_modules_as_arguments_and_captured_outputs():
    class Use(nn.Module):
        @nn.compact
        def __call__(self, x, head):
            return head(jnp.sin(nn.Dense(8)(x)))

    class Parent(nn.Module):
        use: type

        @nn.compact
        def __call__(self, x):
            return self.use()(x, nn.Dense(8, name="head"))

    plain, recomputed, variables = losses(Parent(Use), Parent(jrc.recompute_module(Use)))
    equal_gradients(plain, recomputed, variables)
    captured = [
        Net(block).apply(variables, X, capture_intermediates=True)[1]
        for block in (Block, jrc.recompute_module(Block))
        for variables in [Net().init(KEYS, X)]
    ]
    assert jax.tree.structure(captured[0]) == jax.tree.structure(captured[1])
    assert largest_error(*captured) < 1e-6


def test_forward_mode_second_order_and_batching():
    plain, recomputed, variables = losses(Block(), jrc.recompute_module(Block()))
    jvp = [jax.jvp(f, (variables,), (variables,)) for f in (recomputed, plain)]
    assert largest_error(*jvp) < 1e-6
    hvp = [
        jax.grad(lambda v, f=f: sum(jnp.vdot(g, g) for g in jax.tree.leaves(jax.grad(f)(v))))
        for f in (recomputed, plain)
    ]
    assert largest_error(hvp[0](variables), hvp[1](variables)) < 1e-5
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), variables)
    batched = [jax.vmap(jax.grad(f))(many) for f in (recomputed, plain)]
    assert largest_error(*batched) < 1e-6
