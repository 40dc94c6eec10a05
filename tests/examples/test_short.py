"""The short examples at toy size: what they print is true. `.ci/run` runs them all too."""

import compose_optax
import fit_budget
import flax_modules
import jax
import numpy as np
import pytest
import rnn_scan


@pytest.mark.exhaustive
def test_a_gpt_fits_a_quarter_with_the_same_losses():
    found = fit_budget.main("--steps 2 --length 64".split())
    budget, verified = found["plan"].budget, found["plan"].verified.peak_bytes
    for plain, planned in found["peaks"]:
        assert planned <= budget <= plain / 4 + 2**20
    assert verified == found["peaks"][0][1] > found["least"] > 100_000
    plain, planned = found["losses"]
    assert len(plain) == 2 and plain[0] != plain[1]
    np.testing.assert_allclose(planned, plain, rtol=1e-5)


@pytest.mark.exhaustive
def test_recomputed_modules_need_less_memory_and_are_equal():
    found = flax_modules.main("--layers 2 --width 16 --batch 128".split())
    for kind in ("linen", "nnx"):
        plain, *_ = found[kind, "plain"]
        for name in ("recompute_module", "jrc.plan"):
            peak, *equal = found[kind, name]
            assert peak < plain and equal == [True, True, True], (kind, name)


@pytest.mark.slow
def test_recomputed_loops_save_less_and_have_equal_losses():
    reports, losses = rnn_scan.main("--steps 3 --length 100 --width 8".split())
    plain, *lean = reports
    for name in lean:
        assert reports[name].memory.temporaries < reports[plain].memory.temporaries / 2
        assert 1 < reports[name].flops / reports[plain].flops < 3
        np.testing.assert_allclose(losses[name], losses[plain], rtol=1e-5)
    assert losses[plain][2] < losses[plain][0]


@pytest.mark.exhaustive
def test_compression_in_every_chain_sends_less_and_replicas_stay_equal():
    found = compose_optax.main("--steps 4 --replicas 2 --layers 1 --width 32".split())
    dense, *others = found.values()
    for each in others:
        assert each["bytes"] < 0.7 * dense["bytes"] and each["density"] < 0.02
        assert np.isfinite(each["loss"])
        for x in jax.tree.leaves(each["state"].params):
            one, two = (np.asarray(shard.data) for shard in x.addressable_shards)
            assert np.array_equal(one, two)
    by_name = {name.strip(): each for name, each in found.items()}
    rate = by_name["inject_hyperparams"]["state"].opt_state.hyperparams["rate"]
    assert 0 < float(rate) <= 0.1
