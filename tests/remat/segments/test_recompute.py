"""The call form of one segment, in both builds."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jrc
from tests.remat.measure import bit_equal, largest_error, operators, saved_bytes

W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
X = jnp.linspace(-0.4, 0.6, 16).reshape(4, 4)
both = pytest.mark.parametrize("reentrant", [True, False])


def block(w, x):
    return jnp.sin(jnp.sin(x @ w) @ w)


@both
def test_equal_gradients_fewer_bytes_two_dots_more(reentrant):
    def loss(w, x, call):
        return jnp.sum(call(block, w, x) ** 2)

    plain = functools.partial(loss, call=lambda f, *args: f(*args))
    lean = functools.partial(loss, call=functools.partial(jrc.recompute, use_reentrant=reentrant))
    grads = [jax.value_and_grad(f, argnums=(0, 1)) for f in (lean, plain)]
    with jax.disable_jit():
        assert bit_equal(grads[0](W, X), grads[1](W, X))
    assert largest_error(*(jax.jit(g)(W, X) for g in grads)) < 1e-6
    assert saved_bytes(lean, W, X) < saved_bytes(plain, W, X)
    more = operators(grads[0], W, X)["dot_general"] - operators(grads[1], W, X)["dot_general"]
    assert more == 2


@both
def test_the_compiled_program_recomputes(reentrant):
    """Without the barriers XLA would find the first result and merge the two."""

    def dots(call):
        loss = lambda w, x: jnp.sum(call(block, w, x))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss)).lower(W, X).compile().as_text().count(" dot(")

    again = functools.partial(jrc.recompute, use_reentrant=reentrant)
    assert dots(again) == dots(lambda f, *args: f(*args)) + 2


@both
def test_closures_and_parameters_get_gradients(reentrant):
    def loss(w):
        scale = jnp.sin(w)
        integers = jnp.arange(4)
        # No argument of the call needs a gradient; the closure does.
        return jnp.sum(
            jrc.recompute(lambda i: jnp.cos(scale[i] @ w), integers, use_reentrant=reentrant)
        )

    plain = jax.grad(lambda w: jnp.sum(jnp.cos(jnp.sin(w)[jnp.arange(4)] @ w)))(W)
    assert largest_error(jax.grad(loss)(W), plain) < 1e-6


@both
def test_trees_static_leaves_keywords_and_integers(reentrant):
    def function(params, tokens, mode, *, depth, flag=None):
        assert mode == "train" and depth == 2 and flag is None
        x = params["w"][tokens]
        for _ in range(depth):
            x = jnp.sin(x @ params["w"])
        return {"x": x, "mode": mode, "none": None, "tokens": tokens + 1, "positive": x > 0}

    def call(w):
        return jrc.recompute(
            function,
            {"w": w, "name": "net"},
            jnp.arange(4),
            "train",
            depth=2,
            use_reentrant=reentrant,
        )

    out = call(W)
    assert out["mode"] == "train" and out["none"] is None and out["tokens"].tolist() == [1, 2, 3, 4]
    assert out["positive"].dtype == bool
    got = jax.grad(lambda w: jnp.sum(call(w)["x"]))(W)
    want = jax.grad(lambda w: jnp.sum(jnp.sin(jnp.sin(w[jnp.arange(4)] @ w) @ w)))(W)
    assert largest_error(got, want) < 1e-6
    with pytest.raises(TypeError, match="unexpected keyword argument 'deep'"):
        jrc.recompute(block, W, X, deep=1, use_reentrant=reentrant)


@both
def test_nested_and_higher_order(reentrant):
    def lean(w):
        inner = functools.partial(jrc.recompute, block, use_reentrant=reentrant)
        return jnp.sum(
            jrc.recompute(lambda w, x: inner(w, inner(w, x)), w, X, use_reentrant=reentrant)
        )

    def plain(w):
        return jnp.sum(block(w, block(w, X)))

    assert largest_error(jax.grad(lean)(W), jax.grad(plain)(W)) < 1e-6
    again = [jax.grad(lambda w, f=f: jnp.sum(jax.grad(f)(w) ** 2)) for f in (lean, plain)]
    assert largest_error(again[0](W), again[1](W)) < 1e-5


@jax.custom_jvp
def underivable(x):
    return x + 1.0


@underivable.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError("no derivative")


@pytest.mark.parametrize(
    "options", [{}, {"use_reentrant": False}, {"preserve_rng_state": False}], ids=str
)
def test_frozen_arguments_may_have_no_derivative(options):
    def function(w, frozen, n, key):
        shift = jax.lax.fori_loop(0, n, lambda _, x: x * 1.1, frozen)
        return jnp.sin(W @ w + shift + underivable(frozen)), n + 1, underivable(frozen)

    def loss(w, frozen, n, call):
        y, _, other = call(function, w, frozen, n, jax.random.key(0))
        return jnp.sum(y) + jnp.sum(other)

    again = functools.partial(jrc.recompute, **options)
    f = jax.jit(jax.grad(loss), static_argnums=3)
    plain = lambda f, *args: f(*args)  # noqa: E731
    assert largest_error(f(W, X, 3, again), f(W, X, 3, plain)) < 1e-6
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda frozen: loss(W, frozen, 0, again))(X)


@pytest.mark.parametrize("preserve", [True, False])
def test_a_cotangent_may_be_a_python_number(preserve):
    def run(w):
        function = lambda w, key: jnp.sum(jnp.sin(w))  # noqa: E731
        return jrc.recompute(function, w, jax.random.key(0), preserve_rng_state=preserve)

    (got,) = jax.vjp(run, W)[1](1.0)
    assert largest_error(got, jnp.cos(W)) < 1e-6


def test_forward_mode_needs_use_reentrant_false():
    call = functools.partial(jrc.recompute, block)
    tangent = jax.jvp(lambda w: call(w, X, use_reentrant=False), (W,), (W,))
    assert largest_error(tangent, jax.jvp(lambda w: block(w, X), (W,), (W,))) < 1e-6
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda w: call(w, X), (W,), (W,))


@both
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_scan_and_vmap(reentrant, check_vma):
    mesh = Mesh(jax.devices()[:4], ("data",))

    def loss(call, w, x):
        step = lambda c, _: (call(w, c), None)  # noqa: E731
        return jnp.sum(jax.vmap(lambda x: jax.lax.scan(step, x, None, length=2)[0])(x[None]))

    def run(call):
        def local(w, x):
            if check_vma:
                w = jax.lax.pcast(w, "data", to="varying")
            return jax.lax.psum(jax.grad(functools.partial(loss, call))(w, x), "data")

        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs))(W, X)

    lean = functools.partial(jrc.recompute, block, use_reentrant=reentrant)
    assert largest_error(run(lean), run(block)) < 1e-6


@both
def test_dropout_mask_is_the_same_in_the_rerun(reentrant):
    def dropped(w, key):
        return jnp.sin(X @ w) * jax.random.bernoulli(key, 0.5, X.shape)

    def loss(w, key, call):
        return jnp.sum(call(dropped, w, key))

    again = functools.partial(jrc.recompute, use_reentrant=reentrant)
    for key in (jax.random.key(2), jax.random.PRNGKey(2)):
        got, want = (jax.grad(loss)(W, key, call) for call in (again, lambda f, *args: f(*args)))
        assert largest_error(got, want) < 1e-6


def test_state_is_not_preserved_on_demand():
    """The recomputed mask is another one: the gradient is not that of the result."""

    def dropped(w, keys):
        return w * jax.random.bernoulli(keys[0], 0.5, w.shape)

    keys, ones = jax.random.split(jax.random.key(0), 2), jnp.ones(1000)

    def loss(w, preserve):
        return jnp.sum(jrc.recompute(dropped, w, keys, preserve_rng_state=preserve))

    mask = dropped(ones, keys)
    exact, other = (jax.grad(loss)(ones, preserve) for preserve in (True, False))
    assert bit_equal(exact, mask)
    assert 300 < int(jnp.sum(other != mask)) < 700 and 400 < int(jnp.sum(other)) < 600
    assert bit_equal(loss(ones, False), loss(ones, True))
    with pytest.raises(ValueError, match="must contain a typed key.*got none"):
        jrc.recompute(block, W, X, preserve_rng_state=False)
    with pytest.raises(ValueError, match="must be True with preserve_rng_state=False"):
        jrc.recompute(dropped, W, keys, preserve_rng_state=False, use_reentrant=False)
    with pytest.raises(TypeError, match="function must be the function to call, got"):
        jrc.recompute(X, block)


@both
def test_running_statistics_are_updated_once(reentrant):
    traces = []

    def norm(x, mean):
        traces.append(1)
        return x - jnp.mean(x), 0.9 * mean + 0.1 * jnp.mean(x)

    def loss(x):
        y, mean = jrc.recompute(norm, x, jnp.zeros(()), use_reentrant=reentrant)
        return jnp.sum(y**2), mean

    grads, mean = jax.grad(loss, has_aux=True)(X)
    assert largest_error(mean, 0.1 * jnp.mean(X)) < 1e-6 and len(traces) == 1
    assert grads.shape == X.shape


class FiveBlocks:
    """The net of Paddle's test: five blocks, some of which are called through `recompute`."""

    def __init__(self, again, **options):
        self.again, self.options = frozenset(again), options

    def init(self, key):
        sizes = [10, 10, 10, 10, 10, 1]
        keys = jax.random.split(key, 5)
        return [
            {"w": jax.random.normal(k, (i, o)) / i**0.5, "b": jnp.zeros(o)}
            for k, i, o in zip(keys, sizes, sizes[1:], strict=False)
        ]

    def loss(self, params, x, key):
        for i, block in enumerate(params):
            call = self.block if i not in self.again else functools.partial(
                jrc.recompute, self.block, **self.options
            )  # fmt: skip
            x = call(block, x, jax.random.fold_in(key, i))
        return jnp.mean(x)

    @staticmethod
    def block(params, x, key):
        x = jax.nn.relu(x @ params["w"] + params["b"][None])
        return x * jax.random.bernoulli(key, 0.9, x.shape)

    def train(self):
        @jax.jit
        def step(params, x, key):
            loss, grads = jax.value_and_grad(self.loss)(params, x, key)
            return loss, jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), grads

        params, found = self.init(jax.random.key(0)), []
        for i in range(10):
            key = jax.random.fold_in(jax.random.key(1), i)
            loss, params, grads = step(params, jax.random.normal(key, (2, 10)), key)
            found.append((loss, params, grads))
        return found


@pytest.mark.exhaustive(after=1)
@pytest.mark.slow
@both
def test_paddle_s_five_blocks_train_alike_whatever_is_recomputed(reentrant):
    """Blocks 1 and 2, then every choice among 1, 3 and among 1, 2, 3."""
    choices = {(1, 2), (1,), (3,), (1, 3), (2,), (2, 3), (1, 2, 3)}
    plain = FiveBlocks(()).train()
    for again in sorted(choices):
        assert largest_error(FiveBlocks(again, use_reentrant=reentrant).train(), plain) < 1e-6, (
            again
        )


def test_a_module_that_changes_itself_is_named():
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    for function in (norm, lambda x: norm(x)):
        with pytest.raises(TypeError, match="must not change a flax module in place.*BatchNorm|la"):
            jrc.recompute(function, X)
    with pytest.raises(TypeError, match=r"Call jrc.recompute_module\(module\)\(x\) instead"):
        jrc.recompute(norm, X)
    assert jrc.recompute_module(norm)(X).shape == X.shape
