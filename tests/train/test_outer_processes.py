"""Two processes with an outer optimizer: as one process with as many devices."""

import pickle

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.processes import ranks, run_processes
from tests.train.outer_in_processes import STEPS, STREAMED, start
from tests.train.test_processes import bits, copies
from tests.train.train_in_processes import whole


@pytest.mark.slow
def test_two_processes_train_resume_and_stay_equal(tmp_path):
    run_processes(ranks("tests.train.outer_in_processes", 2, 1, tmp_path))
    found = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    for each in found:
        assert bits(each["resumed"]) == bits(each["state"])
        assert [bool(info.synchronised) for info in each["infos"]][:3] == [False, False, True]
        assert each["infos"][0].losses.shape == (1,)
        # Saved with an exchange under way.
        assert bits(each["streamed"]["resumed"]) == bits(each["streamed"]["state"])
    for outer in ({}, {"outer": STREAMED}):
        ran = [each["streamed"] if outer else each for each in found]
        for same in copies([each["state"].params for each in ran]):
            assert len({x.tobytes() for x in same}) == 1
        state, step = start(Mesh(jax.devices()[:2], ("data",)), **outer)
        for i in range(STEPS):
            state, info = step(state, whole(i))
            ends = [each["infos"][i] for each in ran]
            losses = np.concatenate([end.losses for end in ends])
            np.testing.assert_allclose(losses, info.losses, rtol=1e-4)
            assert ends[0].loss.tobytes() == ends[1].loss.tobytes()
