"""A mark is an identity, and every JAX transformation preserves its name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jrc
from jrc._jaxpr import mark_of, trace, walk

X = jnp.linspace(-1.0, 1.0, 6)


def f(x):
    return jnp.sin(jrc.mark(x * 2, "double")) * 3


def plain(x):
    return jnp.sin(x * 2) * 3


TRANSFORMS = {
    "call": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](x),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": jax.hessian,
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, y: (f(c), y), x, x)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x[0] < 0, f, lambda x: x, x),
    "checkpoint": lambda f: jax.jacrev(jax.checkpoint(f)),
    "shard_map": lambda f: jax.shard_map(
        f, mesh=Mesh(jax.devices()[:2], ("i",)), in_specs=P("i"), out_specs=P("i")
    ),
    "pmap": lambda f: lambda x: jax.pmap(f)(x.reshape(2, 3)),
}


@pytest.mark.slow(after=3, every=True)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_identity_under(name):
    got, want = (jax.tree.leaves(TRANSFORMS[name](g)(X)) for g in (f, plain))
    assert all(np.allclose(a, b, rtol=1e-6) for a, b in zip(got, want, strict=True))
    names = [mark_of(eqn) for eqn, _ in walk(jax.make_jaxpr(TRANSFORMS[name](f))(X))]
    assert ("double", 0) in names


def test_linear_transpose():
    double = lambda x: jrc.mark(x * 2, "double")  # noqa: E731
    assert np.allclose(jax.linear_transpose(double, X)(X)[0], 2 * X)


def test_keys_integers_and_other_leaves():
    tree = {"key": jax.random.key(0), "n": jnp.arange(3), "s": "text", "none": None, "py": 3}
    out = jax.jit(lambda key, n: jrc.mark({**tree, "key": key, "n": n}, "all")["key"])(
        tree["key"], tree["n"]
    )
    assert jnp.array_equal(jax.random.key_data(out), jax.random.key_data(tree["key"]))
    marked = jrc.mark(tree, "all")
    assert marked["s"] == "text" and marked["none"] is None and marked["py"] == 3


def test_the_compiled_program_does_not_contain_it():
    texts = [jax.jit(g).lower(X).compile().as_text().partition("ENTRY")[2] for g in (f, plain)]
    assert [t.count("fusion") + t.count("copy") for t in texts][0] <= texts[1].count("fusion")


def test_repeated_names_are_numbered_in_program_order():
    def many(x):
        for _ in range(3):
            x = jrc.mark((x + 1, x * 2), "pair")[1]
        return checkpoint_name(x, "tag")

    marks = trace(many, (X,), {}).program.marks
    assert list(marks) == ["pair", "pair#2", "pair#3", "tag"]
    assert [len(positions) for positions in marks.values()] == [2, 2, 2, 1]
