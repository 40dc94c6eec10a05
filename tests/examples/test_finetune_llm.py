"""The day with a language model, at toy size, and the model that it trains."""

import finetune_llm
import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
from flax import nnx

TOY = (
    "--steps 4 --sync-every 2 --layers 1 --width 32 --length 64 --batch 4 --replicas 2 "
    "--save-every 2 --budget 1600KiB"
).split()


@pytest.mark.exhaustive  # .ci/run runs it once, without the second run
def test_a_day_fits_its_budget_and_a_resumed_one_is_the_same(tmp_path):
    def day(*more):
        return finetune_llm.run(finetune_llm.arguments([*TOY, "--out", str(tmp_path), *more]))

    found = day()
    plain, planned, step = found["peaks"].values()
    assert planned <= 1600 * 2**10 and step <= 1600 * 2**10 < plain
    before, alone, together = found["losses"].values()
    assert together < alone < before
    assert 0 < found["sent"] < found["dense"] / 50
    for name in ("loss.png", "memory.png", "plan.json", "params"):
        assert (tmp_path / name).exists()
    again = day("--resume")
    assert again["losses"] == found["losses"] and again["sent"] == found["sent"]

    # The end of a day is the start of another one.
    options = finetune_llm.arguments([*TOY, "--start", str(tmp_path / "params")])
    _, random = finetune_llm.model_of(finetune_llm.arguments(TOY))
    _, trained = finetune_llm.model_of(options)
    for x, y in zip(*map(jax.tree.leaves, (trained, random)), strict=True):
        assert x.shape == y.shape and bool(jnp.any(x != y))


@pytest.mark.slow
def test_tokens_of_the_model_see_only_what_comes_before():
    config = llama.Config(layers=1, width=16, heads=4, key_heads=2)
    model = llama.Llama(config, rngs=nnx.Rngs(0))
    tokens = jnp.arange(12)[None] % 7
    changed = tokens.at[0, 8].set(200)
    one, two = map(jax.jit(lambda tokens: model(tokens)), (tokens, changed))
    np.testing.assert_array_equal(one[0, :8], two[0, :8])
    assert jnp.any(one[0, 8:] != two[0, 8:])


def test_rotation_depends_on_the_distance_alone():
    tables = llama.rotary(16, 8)
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    turned = [llama.rotated(jnp.tile(x, (1, 16, 1, 1)), tables)[0, :, 0] for x in (query, key)]
    products = turned[0] @ turned[1].T
    np.testing.assert_allclose(products[5, 3], products[12, 10], rtol=1e-4)
    assert abs(products[5, 3] - products[5, 4]) > 1e-3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--steps", "5"], "--steps must be a multiple of --sync-every 2, got 5"),
        (["--width", "20"], "--width must be a multiple of 8, got 20"),
        (["--batch", "0"], "--batch must be a whole number >= 1, got 0"),
    ],
)
def test_options_that_cannot_be(more, words, capfd):
    with pytest.raises(SystemExit):
        finetune_llm.arguments([*TOY, *more])
    assert words in " ".join(capfd.readouterr().err.split())
