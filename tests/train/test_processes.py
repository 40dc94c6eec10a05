"""Several processes that train together, each with its own part of the data."""

import functools
import pickle
import random
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jrc
from tests.processes import Processes, ranks, run_processes
from tests.train.train_in_processes import STEPS, compress, start, whole

LAYOUTS = {"2 processes": (2, 1), "4 processes": (4, 1), "2 processes of 2 devices": (2, 2)}
# Four at once take a minute on two cores.
MARKS = {"4 processes": pytest.mark.exhaustive, "2 processes of 2 devices": pytest.mark.exhaustive}
EACH = [pytest.param(n, marks=MARKS.get(n, ())) for n in LAYOUTS]


@functools.cache
def found(layout):
    """What every process of one launch had in the end."""
    count, devices = LAYOUTS[layout]
    part = "all" if (count, devices) == (2, 1) else "train"
    with tempfile.TemporaryDirectory() as folder:
        run_processes(ranks("tests.train.train_in_processes", count, devices, folder, part))
        texts = [Path(folder, f"{rank}.pickle").read_bytes() for rank in range(count)]
    return [pickle.loads(text) for text in texts]


def is_parts(node):
    return isinstance(node, dict) and all(key.startswith("(") for key in node)


def bits(tree):
    """Every leaf's parts with their places, exactly."""
    leaves = jax.tree.leaves(tree, is_leaf=is_parts)
    return [{place: x.tobytes() for place, x in leaf.items()} for leaf in leaves]


def copies(trees):
    """Each leaf's copies on all devices of all processes, for what is the same everywhere."""
    leaves = [jax.tree.leaves(tree, is_leaf=is_parts) for tree in trees]
    return [[x for leaf in same for x in leaf.values()] for same in zip(*leaves, strict=True)]


@functools.cache
def in_one_process(replicas, dense=False):
    mesh = Mesh(jax.devices()[:replicas], ("data",))
    state, step = start(optax.adam(1e-2) if dense else compress(), mesh)
    infos = []
    for i in range(4 if dense else STEPS):
        state, info = step(state, whole(i))
        infos.append(info)
    return state, infos


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("layout", EACH)
def test_processes_agree_bit_for_bit_and_with_one_process(layout):
    replicas = np.prod(LAYOUTS[layout])
    every = [process["train"] for process in found(layout)]
    alone, infos = in_one_process(int(replicas))
    params = copies([process["state"].params for process in every])
    for leaf, want in zip(params, jax.tree.leaves(alone.params), strict=True):
        assert all(x.tobytes() == leaf[0].tobytes() for x in leaf)
        assert np.abs(leaf[0] - want).max() <= 1e-5
    for process in every:
        for info, want in zip(process["infos"], infos, strict=True):
            assert info.bytes_sent == want.bytes_sent and info.density == want.density
            assert np.isclose(info.loss, want.loss, rtol=1e-5)
    # Every process has the rows of its own replicas, and no others.
    rows = [set(process["state"].opt_state[0].u["in"]) for process in every]
    assert len(set.union(*rows)) == sum(map(len, rows)) == replicas


@pytest.mark.exhaustive  # in one process every form is compared with its formula
@pytest.mark.parametrize("layout", EACH)
def test_every_form_of_exchange_is_visited(layout):
    infos = found(layout)[0]["train"]["infos"]
    dense = infos[0].bytes_sent
    forms = [
        "dense" if info.density == 1 else "masked" if info.bytes_sent == dense else "sparse"
        for info in infos
    ]
    assert sorted(set(forms), key=forms.index) == ["dense", "masked", "sparse"]


@pytest.mark.parametrize("layout", EACH)
def test_a_resumed_run_is_the_unbroken_one(layout):
    for process in found(layout):
        assert bits(process["train"]["again"]) == bits(process["train"]["state"])


@pytest.mark.parametrize("layout", EACH)
def test_a_flush_is_equal_on_all(layout):
    every = [process["train"] for process in found(layout)]
    alone, _ = in_one_process(int(np.prod(LAYOUTS[layout])))
    params = copies([process["flushed"].params for process in every])
    for leaf, want in zip(params, jax.tree.leaves(jrc.flush(alone, 0.1).params), strict=True):
        assert all(x.tobytes() == leaf[0].tobytes() for x in leaf)
        assert np.abs(leaf[0] - want).max() <= 1e-5
    rows = [process["flushed"].opt_state[0].v["in"] for process in every]
    assert not any(np.any(x) for parts in rows for x in parts.values())


@pytest.mark.parametrize("layout", EACH)
def test_a_nan_on_one_process_is_skipped_on_all(layout):
    for process in found(layout):
        before, after = process["train"]["state"], process["train"]["after"]
        old, new = before.opt_state[0], after.opt_state[0]
        assert process["train"]["skipped"]
        assert bits((old.u, old.v, old.velocity, old.step, before.params)) == bits(
            (new.u, new.v, new.velocity, new.step, after.params)
        )
        assert all(int(x) == 1 for x in new.skipped.values())


@pytest.mark.parametrize("layout", EACH)
def test_a_dense_optimizer(layout):
    replicas = int(np.prod(LAYOUTS[layout]))
    every = [process["dense"] for process in found(layout)]
    alone, infos = in_one_process(replicas, dense=True)
    params = copies([process["params"] for process in every])
    for leaf, want in zip(params, jax.tree.leaves(alone.params), strict=True):
        assert all(x.tobytes() == leaf[0].tobytes() for x in leaf)
        assert np.abs(leaf[0] - want).max() <= 1e-5
    assert {process["bytes"] for process in every} == {float(infos[-1].bytes_sent)}
    assert all(np.isfinite(process["dense"]["shorter"]) for process in found(layout))


@pytest.mark.slow
def test_a_budget_is_met_by_one_plan():
    (plan, loss), other = (process["plan"] for process in found("2 processes"))
    assert (plan, loss) == other
    assert jrc.Plan.from_json(plan).reruns
    assert np.isclose(loss, in_one_process(2)[1][0].loss, rtol=1e-5)


ERRORS = {
    "own part as the whole": "ValueError: jrc.make_train_step: arrays of batch on one process must "
    "be the whole batch, equal on every process, got different '0', '1'. Join the parts of the "
    "processes, of equal sizes: jax.make_array_from_process_local_data(",
    "ragged": "got shape [17, 16] at '0'",
    "uneven parts": "got different '(names, shapes or dtypes)'",
    "other parameters": "ValueError: jrc.init_state: params, model_state and key must be equal on "
    "all 2 processes, got different 'params/in', 'params/out'. Draw them from the same key on "
    "every process.",
    "pmap": "one process with via='pmap', got devices of 2. Use via='shard_map'.",
    "jit": "mesh must be given with via='jit' in a run of 2 processes, got None.",
    "budget": "BudgetError: jrc.make_train_step: the least peak that was found of the whole step",
    "array of one process": "got 'x' on process {rank} only. Place it on the mesh",
    "no array here": "got str 'text' at 'x'",
    "other trees": "ValueError: jrc.save: state must have the same tree, shapes and dtypes",
    "folders apart": "in which process 1 does not see what process 0 writes",
    "nothing to restore": "FileNotFoundError: jrc.restore: ",
    "missing here": "FileNotFoundError: jrc.restore: path must be the folder of a save, got",
    "other save": "in which process 1 does not see jrc_0",
    "other replicas": "got float32[4, 16, 64] for leaf 'opt_state/0/u/in', which was saved as "
    "float32[2, 16, 64]. Build like as it was saved",
}


def test_what_is_wrong_anywhere_is_an_error_everywhere():
    every = [process["errors"] for process in found("2 processes")]
    for rank, texts in enumerate(every):
        for name, words in ERRORS.items():
            assert words.format(rank=rank) in texts[name], (rank, name, texts[name])
    # If one process alone fails, the error on the other names it.
    for name in (
        "ragged",
        "budget",
        "no array here",
        "folders apart",
        "missing here",
        "other save",
    ):
        assert "process 1 failed, and so all stop. " in every[0][name]
        assert "and so all stop" not in every[1][name]
    name = "no device here"
    assert every[0][name] == "" and "got 'cpu:0', of which process 1 has none" in every[1][name]


@pytest.mark.slow
def test_a_mesh_without_one_of_the_processes_stops_all(tmp_path):
    """Of three, so that the mesh has devices of several; they train nothing."""
    run_processes(ranks("tests.train.train_in_processes", 3, 1, tmp_path, "left out"))
    files = [tmp_path / f"{rank}.pickle" for rank in range(3)]
    *others, last = [pickle.loads(file.read_bytes())["left out"] for file in files]
    assert last.startswith(
        "ValueError: jrc.init_state: mesh must have devices of every process, got"
    )
    for text in others:
        assert text.startswith("FailedElsewhere: jrc.init_state: process 2 failed, and so all stop")
        assert "got 'cpu:0'" in text and "of which process 2 has none" in text


@pytest.mark.slow
@pytest.mark.parametrize("background", [[], ["background"]], ids=["", "background"])
def test_killed_processes_leave_the_last_whole_save(background, tmp_path):
    given = ranks("tests.train.save_until_killed", 2, tmp_path, *background)
    with Processes(given) as processes:
        while (saved := processes.said()[0].count("saved")) < 2:
            assert all(process.poll() is None for process in processes.all), processes.said()
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3))  # anywhere between two saves, or in the middle of one
        processes.kill()
    state, step = start(compress(), Mesh(jax.devices()[:2], ("data",)))
    found = jrc.restore(tmp_path, state)
    assert int(found.step) >= saved - len(background)  # the last one was being written
    for i in range(int(found.step)):
        state, _ = step(state, whole(i))
    for leaf, want in zip(*map(jax.tree.leaves, (found.params, state.params)), strict=True):
        assert np.abs(np.asarray(leaf) - want).max() <= 1e-5
    jrc.save(tmp_path, state)
    assert len(list(tmp_path.glob("jrc_*"))) == 1
