"""Two processes with an outer optimizer: as one process with as many devices."""

import pickle

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from tests.processes import ranks, run_processes
from tests.train import outer_sharded_in_processes as sharded
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


@pytest.mark.exhaustive
def test_two_processes_are_two_replicas_of_four_devices(tmp_path):
    run_processes(ranks("tests.train.outer_sharded_in_processes", 2, 4, tmp_path))
    found = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    mesh = jax.make_mesh((2, 2, 2), sharded.AXES, axis_types=(AxisType.Auto,) * 3)
    state, step = sharded.start(mesh)
    for i in range(sharded.STEPS):
        state, info = step(state, sharded.whole(i))
        ends = [each["infos"][i] for each in found]
        losses = np.concatenate([end.losses for end in ends])
        np.testing.assert_allclose(losses, info.losses, rtol=1e-4)
        assert ends[0].loss.tobytes() == ends[1].loss.tobytes()
        assert ends[0].bytes_sent == ends[1].bytes_sent == info.bytes_sent
    leaves = jax.tree.leaves(jax.tree.map(np.asarray, sharded.plain(state)))
    for each in found:
        for parts, again, x in zip(each["state"], each["resumed"], leaves, strict=True):
            assert all(parts[i].tobytes() == again[i].tobytes() for i in parts)
            for index, part in parts.items():
                want = x[eval(index)]
                np.testing.assert_allclose(part, want, rtol=1e-4, atol=1e-4)
