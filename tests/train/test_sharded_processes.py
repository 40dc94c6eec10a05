"""Two processes of four devices with split parameters: as one device."""

import pickle

import jax
import numpy as np
import optax
import pytest

import jrc
from tests.processes import ranks, run_processes
from tests.train import sharded_in_processes as sharded
from tests.train.sharded_in_processes import STEPS, loss, some_params, whole

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    run_processes(ranks("tests.train.sharded_in_processes", 2, 4, folder))
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone():
    tx = optax.adamw(1e-2)
    state = jrc.init_state(some_params(), tx, jax.random.key(0), mesh=one())
    step = jrc.make_train_step(loss, tx, mesh=one(), via="jit")
    losses = []
    for i in range(STEPS):
        state, info = step(state, whole(i))
        losses.append(float(info.loss))
    return {name: np.asarray(x) for name, x in state.params.items()}, losses


def one():
    return jax.sharding.Mesh(jax.devices()[:1], ("data",))


def near(parts, want):
    """Whether parts, by their places, are those of a whole array."""
    for place, part in parts.items():
        index = eval(place)
        np.testing.assert_allclose(part, want[index], rtol=1e-5, atol=1e-5)


def test_fsdp_and_tensors_over_both_are_one_device(found, alone):
    params, losses = alone
    for each in found:
        np.testing.assert_allclose(each["train"]["losses"], losses, rtol=1e-5)
        for name, parts in each["train"]["params"].items():
            near(parts, params[name])
    # Each process holds half of what is split over both.
    assert all(len(each["train"]["params"]["a"]) == 4 for each in found)
    assert not set(found[0]["train"]["params"]["a"]) & set(found[1]["train"]["params"]["a"])


def test_a_save_goes_on_over_another_mesh(found, alone):
    for each in found:
        assert each["train"]["kept"]
        for name, parts in each["train"]["again"].items():
            near(parts, alone[0][name])


def test_a_state_moves_to_some_devices_of_each_process(found):
    """`jax.device_put` moves no array of several processes to other devices."""
    params, sums, loss = sharded.moved()
    for each in found:
        its_params, its_sums, its_loss = each["moved"]
        assert its_loss == pytest.approx(loss, rel=1e-5)
        for name in params:
            (whole,) = {x.tobytes(): x for x in params[name].values()}.values()
            near(its_params[name], whole)
            ((place, sent_later),) = its_sums[name].items()
            np.testing.assert_allclose(sent_later, sums[name][place], rtol=1e-4, atol=1e-5)


CHANGED = (
    "ValueError: jrc.make_train_step: batch must change its shapes on every process in the same "
    "step and alike, got float32[{}, 16] at '0', float32[32, 16] before, on process {} and not on "
    "all. Drop the rest of the data where it runs out, so that every process has as many parts of "
    "equal size."
)


def test_a_process_that_changes_its_batch_speaks(found):
    first, second = (each["errors"][0] for each in found)
    assert first["apart"] == CHANGED.format(96, 0)
    assert second["apart"] == CHANGED.format(64, 1)
    assert second["alone"] == CHANGED.format(16, 1)


def test_more_processes_than_parts_of_the_batch_speak(found, alone):
    for each in found:
        texts, first = each["errors"]
        assert texts["copies"] == (
            "ValueError: jrc.make_train_step: processes that hold the same examples of batch must "
            "hold equal ones, got different '0' on processes 0, 1. The batch is split over 'fsdp', "
            "which does not tell these processes apart: give each of them the same part, or split "
            "the batch over an axis that does."
        )
        assert first == pytest.approx(alone[1][0], rel=1e-5)
