import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jrc.dgc._selectors import top_k
from jrc.dgc._selectors.threshold import kth_largest, largest_mask, magnitude_bits
from jrc.dgc._selectors.top_k import largest

KINDS = ("normal", "tied", "zeros", "few", "ascending", "denormal", "infinite")


def data(kind, n, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n).astype(np.float32)
    match kind:
        case "tied":
            values = rng.integers(-3, 4, n).astype(np.float32)
        case "zeros":
            values = np.where(rng.random(n) < 0.5, 0.0, -0.0).astype(np.float32)
        case "few":
            values = np.where(rng.random(n) < 0.01, values, 0).astype(np.float32)
        case "ascending":
            values = np.arange(n, dtype=np.float32)
        case "denormal":
            # Powers of two down to the smallest normal number.
            values = (2.0 ** rng.integers(-126, 0, n)).astype(np.float32)
        case "infinite":
            values[rng.integers(0, n)] = np.inf
            values[rng.integers(0, n)] = -np.inf
    return values


def expected(values, k):
    return np.sort(np.argsort(-np.abs(values), kind="stable")[:k])


@pytest.fixture
def in_two_stages(monkeypatch):
    monkeypatch.setattr(top_k, "SMALL", 0)


@pytest.mark.exhaustive
@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(1, 5000),
    share=st.floats(0, 1),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
)
@example(n=1, share=0.0, kind="zeros", seed=0)
@example(n=17, share=1.0, kind="tied", seed=0)
def test_both_forms_are_argsort(n, share, kind, seed):
    values = data(kind, n, seed)
    k = max(1, int(n * share))
    # Not compiled: every example has another shape.
    with jax.disable_jit():
        indices = np.asarray(largest(jnp.asarray(values), k))
    mask = np.asarray(largest_mask(jnp.asarray(values), k))
    np.testing.assert_array_equal(np.sort(indices), expected(values, k))
    np.testing.assert_array_equal(np.flatnonzero(mask), expected(values, k))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [128, 2049, 5000, 4096])
def test_two_stages_are_argsort(n, kind, in_two_stages):
    select = jax.jit(largest, static_argnums=1)
    for k in {1, n // 300 + 1, n // 128}:
        for seed in range(3):
            values = data(kind, n, seed)
            indices = np.asarray(select(values, k))
            np.testing.assert_array_equal(np.sort(indices), expected(values, k))


@pytest.mark.parametrize("kind", KINDS)
def test_counting_is_argsort(kind, in_two_stages):
    values = data(kind, 5001, 1)
    indices = np.asarray(jax.jit(largest, static_argnums=1)(values, 1250))
    np.testing.assert_array_equal(np.sort(indices), expected(values, 1250))


def test_large_tensor_takes_two_stages():
    values = data("tied", 70_001, 0)
    jaxpr = str(jax.make_jaxpr(lambda v: largest(v, 70))(values))
    assert "f32[4376]" in jaxpr
    np.testing.assert_array_equal(np.sort(largest(jnp.asarray(values), 70)), expected(values, 70))


def test_mask_with_a_traced_count_compiles_once():
    select = jax.jit(largest_mask)
    values = data("tied", 1000, 3)
    for k in (1, 7, 250, 1000):
        np.testing.assert_array_equal(np.flatnonzero(select(values, k)), expected(values, k))
    assert select._cache_size() == 1


@pytest.mark.parametrize("sizes", [(1,), (255, 3, 256, 257, 1, 3), (40, 33, 90, 40)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_thresholds_of_rows_of_any_lengths(sizes, share, jitted_thresholds):
    rows = [data("tied" if i % 3 else "normal", n, i) for i, n in enumerate(sizes)]
    counts = [max(1, int(n * share)) for n in sizes]
    bits = [magnitude_bits(jnp.asarray(x)) for x in rows]
    found = jitted_thresholds(bits, jnp.asarray(counts))
    want = [np.sort(np.abs(x))[-k] for x, k in zip(rows, counts, strict=True)]
    np.testing.assert_array_equal(np.asarray(found).view(np.float32), np.float32(want))


@pytest.fixture(scope="module")
def jitted_thresholds():
    return jax.jit(kth_largest)
