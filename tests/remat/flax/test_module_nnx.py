"""flax nnx modules as regions: the same graph of variables, fewer saved bytes."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jrc
from tests.remat.measure import bit_equal, largest_error, rerun_operators, saved_bytes

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)


class Block(nnx.Module):
    def __init__(self, features, *, rngs):
        self.layers = nnx.List(
            [nnx.Linear(features, features, use_bias=False, rngs=rngs) for _ in range(3)]
        )

    def __call__(self, x):
        for layer in self.layers[:2]:
            x = jnp.sin(layer(x))
        return self.layers[2](x)


class Full(nnx.Module):
    """All kinds of state and arguments: statistics, masks, counters, new values, a mode."""

    def __init__(self, features, *, rngs):
        self.first = nnx.Linear(features, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(features, features, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.mode = "new"

    def __call__(self, x, train=True, *, tag="t", rngs=None):
        h = self.norm(jnp.sin(self.first(x)), use_running_average=not train)
        h = self.dropout(h, deterministic=not train, rngs=rngs)
        self.calls[...] += 1
        self.mode, self.seen = tag, nnx.Cache(jnp.mean(h))
        return {"out": self.last(h), "mask": h == 0, "rest": (tag, None)}


class Net(nnx.Module):
    def __init__(self, block=Block, *, rngs):
        self.blocks = nnx.List([block(8, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
            x = x["out"] if isinstance(x, dict) else x
        return x


def net(block, form):
    """Return a net: plain, with its blocks replaced, or built from a recomputed class."""
    if form == "class":
        return Net(jrc.recompute_module(block), rngs=nnx.Rngs(0))
    model = Net(block, rngs=nnx.Rngs(0))
    for i in range(3) if form == "instance" else ():
        model.blocks[i] = jrc.recompute_module(model.blocks[i])
    return model


def loss(model, x=X):
    return jnp.sum(model(x) ** 2)


def pure(model):
    """Return the loss as a function of the parameters, and the parameters."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params: loss(nnx.merge(graph, params, rest, copy=True)), params


def data(tree):
    """Return a tree with key data instead of random keys."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def same_state(*models):
    return bit_equal(*(data(nnx.to_pure_dict(nnx.state(model))) for model in models))


forms = pytest.mark.parametrize("form", ["instance", "class"])


@forms
def test_all_inside_is_recomputed_and_the_output_is_saved(form):
    models = [net(Block, form), net(Block, None)]
    assert same_state(*models)
    assert jax.tree.structure(nnx.state(models[0])) == jax.tree.structure(nnx.state(models[1]))
    (recomputed, params), (plain, _) = (pure(model) for model in models)
    # The last dot of each block makes its output, which is saved.
    assert rerun_operators(recomputed, plain, params) == Counter(dot_general=6, sin=6)
    assert saved_bytes(recomputed, params) < saved_bytes(plain, params) / 3
    with jax.disable_jit():
        assert bit_equal(jax.grad(recomputed)(params), jax.grad(plain)(params))
    assert largest_error(*(jax.jit(jax.grad(f))(params) for f in (recomputed, plain))) < 1e-6


@pytest.mark.slow(after=1, every=True)
@forms
def test_state_once_same_masks_and_gradients_at_the_originals(form):
    recomputed, plain = net(Full, form), net(Full, None)
    for _ in range(2):
        with jax.disable_jit():
            assert bit_equal(*(nnx.value_and_grad(loss)(model) for model in (recomputed, plain)))
        assert same_state(recomputed, plain)
    for model in (recomputed, plain):
        block = model.blocks[2]
        assert block.calls[...] == 2 and block.dropout.rngs.count[...] == 2
        assert block.mode == "t" and block.seen.shape == ()
    # Both views of a module share new attributes.
    block = Full(8, rngs=nnx.Rngs(0))
    jrc.recompute_module(block)(X, tag="mine")
    assert block.mode == "mine" and block.calls[...] == 1 and block.seen.shape == ()


@pytest.mark.slow
def test_training_under_jit():
    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    runs = []
    for model in (net(Full, "instance"), net(Full, None)):
        optimizer = nnx.Optimizer(model, optax.sgd(1e-3, momentum=0.9), wrt=nnx.Param)
        values = [step(model, optimizer, X) for _ in range(3)]
        runs.append((values, data(nnx.to_pure_dict(nnx.state((model, optimizer))))))
    assert len({float(value) for value in runs[0][0]}) == 3
    assert jax.tree.structure(runs[0]) == jax.tree.structure(runs[1])
    assert largest_error(*jax.tree.map(lambda x: jnp.asarray(x, float), runs)) < 1e-5


def test_recomputing_twice_is_recomputing_once():
    once = jrc.recompute_module(Block)
    assert jrc.recompute_module(once) is once is jrc.recompute_module(Block)
    assert once.__name__ == "Block" and issubclass(once, Block)
    plain = Block(8, rngs=nnx.Rngs(0))
    recomputed = jrc.recompute_module(plain)
    assert type(recomputed) is once and jrc.recompute_module(recomputed) is recomputed
    assert recomputed is not plain and recomputed.layers is plain.layers
    losses = [pure(model) for model in (jrc.recompute_module(jrc.recompute_module(plain)), plain)]
    (twice, params), (plain, _) = losses
    assert rerun_operators(twice, plain, params) == Counter(dot_general=2, sin=2)


def test_split_merge_clone_and_graphs_of_equal_type():
    built, replaced, plain = net(Block, "class"), net(Block, "instance"), net(Block, None)
    assert nnx.graphdef(built) == nnx.graphdef(replaced) != nnx.graphdef(plain)
    clone = nnx.clone(built)
    assert type(clone.blocks[0]) is type(built.blocks[0])
    merged = nnx.merge(*nnx.split(built))
    assert bit_equal(merged(X), clone(X))
    # A plain model's saved state fits.
    other = Net(jrc.recompute_module(Block), rngs=nnx.Rngs(1))
    nnx.update(other, nnx.state(plain))
    assert largest_error(other(X), plain(X)) < 1e-6


def test_plain_python_and_streams_as_arguments():
    recomputed, plain = (
        wrap(Full(8, rngs=nnx.Rngs(0))) for wrap in (jrc.recompute_module, lambda module: module)
    )

    def run(model, rngs, x):
        names_in = model(x, True, tag="named", rngs=rngs)
        placed = model(x, train=False)
        assert names_in["rest"] == ("named", None) and placed["rest"] == ("t", None)
        return names_in["out"], names_in["mask"], placed["out"]

    streams = [nnx.Rngs(7), nnx.Rngs(7)]
    got, want = (
        nnx.jit(run)(model, rngs, X)
        for model, rngs in zip((recomputed, plain), streams, strict=True)
    )
    assert bit_equal(got[1], want[1]) and largest_error(got[0::2], want[0::2]) < 1e-6
    assert same_state(*streams) and same_state(recomputed, plain)


def test_arrays_stay_concrete_on_demand():
    class Repeat(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x, times):
            for _ in range(int(times)):
                x = jnp.sin(self.layer(x))
            return x

    with pytest.raises(jax.errors.ConcretizationTypeError):
        jrc.recompute_module(Repeat())(X, jnp.int32(2))
    recomputed = jrc.recompute_module(Repeat, static_argnums=1)()
    assert largest_error(recomputed(X, jnp.int32(2)), Repeat()(X, 2)) < 1e-6


@pytest.mark.slow
def test_scanned_and_mapped_layers():
    def build(recompute):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            block = Block(8, rngs=rngs)
            return jrc.recompute_module(block) if recompute else block

        return make(nnx.Rngs(0))

    def deep(blocks, x=X):
        forward = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.sum(forward(x, blocks) ** 2)

    def wide(blocks, x=X):
        return jnp.sum(nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(blocks, x) ** 2)

    recomputed, plain = build(True), build(False)
    assert same_state(recomputed, plain)
    for run, layers in ((deep, 3), (wide, 1)):
        assert largest_error(*(nnx.grad(run)(model) for model in (recomputed, plain))) < 1e-6
        losses = []
        for model in (recomputed, plain):
            graph, params = nnx.split(model)
            losses.append(lambda p, g=graph, run=run: run(nnx.merge(g, p, copy=True)))
        more = rerun_operators(*losses, nnx.state(plain))
        assert (more["dot_general"], more["sin"]) == (2 * layers, 2 * layers)


def test_shared_and_nested_modules():
    class Shared(nnx.Module):
        def __init__(self, recompute):
            block, whole = Block(8, rngs=nnx.Rngs(0)), Net(Block, rngs=nnx.Rngs(1))
            for i in range(3) if recompute else ():
                whole.blocks[i] = jrc.recompute_module(whole.blocks[i])
            self.block = jrc.recompute_module(block) if recompute else block
            self.whole = jrc.recompute_module(whole) if recompute else whole

        def __call__(self, x):
            return self.whole(self.block(self.block(self.whole(x))))

    (recomputed, params), (plain, _) = (pure(Shared(flag)) for flag in (True, False))
    assert largest_error(jax.grad(recomputed)(params), jax.grad(plain)(params)) < 1e-6
    # Two calls of a block; two calls of a net, which recomputes its three blocks (three dots, two
    # sines each) once, except the dot that is its result.
    predicted = Counter(dot_general=2 * 2 + 2 * (3 * 3 - 1), sin=2 * 2 + 2 * 3 * 2)
    assert rerun_operators(recomputed, plain, params) == predicted


def test_other_methods_and_subclasses():
    class Coder(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))

        def decode(self, x):
            return self.layer(jnp.sin(self.layer(x)))

        def __call__(self, x):
            return self.decode(self.decode(x))

    recomputed, plain = jrc.recompute_module(Coder, methods=["decode", "__call__"])(), Coder()

    def call(x, model):
        return jnp.sum(model(x) ** 2)

    def decode(x, model):
        return jnp.sum(model.decode(x) ** 2)

    # A method that is called inside a region is part of it, and is recomputed once. The gradient of
    # the input alone recomputes no sine but the one before the last.
    for run, more in (
        (call, Counter(dot_general=3, sin=1)),
        (decode, Counter(dot_general=1)),
    ):
        runs = [functools.partial(run, model=model) for model in (recomputed, plain)]
        assert rerun_operators(*runs, X) == more
        assert largest_error(*(jax.grad(f)(X) for f in runs)) < 1e-6

    class Loud(jrc.recompute_module(Coder)):
        def decode(self, x):
            return 2 * super().decode(x)

    assert largest_error(Loud()(X), 2 * plain.decode(2 * plain.decode(X))) < 1e-6


def test_modules_from_outside_a_trace():
    """Reading them is allowed; changing them is not, plain or recomputed."""
    recomputed, plain = (net(Full, form) for form in ("instance", None))
    for model in (recomputed, plain):
        run = jax.jit(lambda x, model=model: model(x))
        with pytest.raises(Exception, match="Cannot mutate .* from a different trace level"):
            run(X)
    blocks, want = net(Block, "class"), net(Block, None)
    got, want = (jax.jit(jax.grad(functools.partial(loss, model)))(X) for model in (blocks, want))
    assert largest_error(got, want) < 1e-6


def test_captured_values():
    class Sower(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            h = jnp.sin(self.layer(x))
            self.sow(nnx.Intermediate, "h", h)
            return self.layer(h)

    def run(model, x):
        return model(x)

    got, want = (
        nnx.capture(run, nnx.Intermediate)(model, X)
        for model in (jrc.recompute_module(Sower()), Sower())
    )
    assert jax.tree.leaves(want[1])
    assert jax.tree.structure(got[1]) == jax.tree.structure(want[1])
    assert largest_error(got, want) < 1e-6


def test_modules_that_are_no_pytrees():
    class Bare(nnx.Module, pytree=False):
        def __init__(self):
            self.layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(0))]

        def __call__(self, x):
            return jnp.sin(self.layers[0](x))

    assert largest_error(jrc.recompute_module(Bare())(X), Bare()(X)) < 1e-6
