"""Over which mesh axes results differ, against what four devices compute, and JAX's own types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jrc._jaxpr import varying_results

NAMES = ("row", "column")
EVERYWHERE = frozenset(NAMES)


def loop(x, w):
    """Carries that begin equal: one stays so, one differs from the second step on, through it."""
    step = lambda _, carry: (carry[0] + w, carry[2], carry[2] + x)  # noqa: E731
    return jax.lax.fori_loop(0, 3, step, (w, w, w))


def until(x, w):
    """Devices that leave a loop after different steps."""
    return jax.lax.while_loop(lambda carry: carry[1] < x, lambda c: (c[0] + w, c[1] + 1), (w, w))


def scanned(x, w):
    step = lambda carry, each: (carry + w, (each, carry, each * x))  # noqa: E731
    return jax.tree.leaves(jax.lax.scan(step, w, jnp.arange(3.0)))


def branches(x, w):
    """What both return equally stays equal, where all devices take the same one."""
    left, right = (lambda: (w, x, 2 * w)), (lambda: (w + 1, w, w))
    return *jax.lax.cond(w > 0, left, right), *jax.lax.cond(x != 2, left, right)


def sums(x, w):
    total = jax.lax.psum((x, w), "row")
    return (
        *total,
        jax.lax.psum(x, NAMES),
        jax.lax.pmax(total[0], "column"),
        jax.lax.all_gather(x, "column"),
        jax.lax.all_gather(x, NAMES, to="invarying"),
        jax.lax.ppermute(w + jax.lax.axis_index("row"), "row", [(0, 1), (1, 0)]),
        jax.lax.all_to_all(jnp.stack([x, w]), "column", 0, 0),
        jax.lax.psum_scatter(jnp.stack([w, 2 * w]), "row"),
        jax.lax.axis_index("column"),
        jax.lax.psum(x, "row", axis_index_groups=[[0], [1]]),
    )


def written(x, w):
    """What is written to a `Ref` inside of a loop, and a reduction by a function."""
    total, other = jax.new_ref(w), jax.new_ref(w)

    def add(_, carry):
        total[...] += x
        return carry + other[...]

    count = jax.lax.fori_loop(0, 2, add, w)
    last = jax.lax.reduce(jnp.stack([w, x]), jnp.float32(0), lambda _, each: each, (0,))
    return total[...], other[...], last, count + total[...]


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda given, tangents: (doubled(*given), 2 * tangents[0]))


def calls(x, w):
    nested = jax.jit(lambda a, b: (jax.checkpoint(jnp.sin)(a), doubled(b), jnp.where(a > 2, b, a)))
    return nested(x, w)


@pytest.mark.parametrize("fn", [loop, until, scanned, branches, sums, written, calls])
def test_what_devices_compute_differs_along_no_other_axes(fn):
    mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), NAMES)
    split, whole = PartitionSpec(*NAMES), PartitionSpec()

    def stacked(x, w):
        return [jnp.asarray(y)[None, None] for y in fn(x[0, 0], w)]

    specs = {"in_specs": (split, whole), "out_specs": split, "check_vma": False}
    run = jax.shard_map(stacked, mesh=mesh, **specs)
    x, w = jnp.array([[1.0, 2.0], [3.0, 5.0]]), jnp.float32(0.5)
    traced = jax.make_jaxpr(run)(x, w).jaxpr
    found = varying_results(traced, [EVERYWHERE, frozenset()])
    for axes, values in zip(found, jax.jit(run)(x, w), strict=True):
        differing = {
            name
            for k, name in enumerate(NAMES)
            if not np.array_equal(values, np.flip(values, axis=k))
        }
        # An equation that writes to one `Ref` may write to all that it reads.
        assert axes == differing or (fn is written and axes > differing)
