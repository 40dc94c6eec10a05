"""Saves are exact and checked, and a failed save leaves the previous one."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import time

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.processes import ROOT
from tests.train.tasks import same_bits


def saves(folder):
    """The names in a folder, without the file of the lock, which stays."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".jrc_lock")


@pytest.fixture
def state():
    split = NamedSharding(Mesh(jax.devices()[:4], ("data",)), P("data"))
    return {
        "typed key": jax.random.split(jax.random.key(0), 2),
        "raw/key": jax.random.PRNGKey(1),
        "raw": {"key": jnp.arange(3)},
        "u": jax.device_put(jnp.arange(8.0), split),
        "bf16": jnp.full(3, 1.1, jnp.bfloat16),
        "nan": jnp.array([jnp.nan, -0.0]),
        "opt": optax.adam(1e-3).init({"w": jnp.ones(3)}),
        "masked": optax.MaskedNode(),
        "none": None,
        "empty": jnp.zeros((0, 3)),
        "numpy": np.arange(3),
    }


def test_round_trip_is_exact(state, tmp_path):
    for _ in range(3):  # each save replaces the previous one
        jrc.save(tmp_path / "a", state)
    found = jrc.restore(tmp_path / "a", state)
    assert jax.tree.structure(found) == jax.tree.structure(state) and same_bits(found, state)
    assert found["u"].sharding == state["u"].sharding
    assert isinstance(found["numpy"], np.ndarray) and found["bf16"].dtype == jnp.bfloat16
    assert saves(tmp_path / "a") == ["jrc_2"]


def test_the_last_saves_are_kept_by_their_steps(tmp_path):
    for step in (2, 4, 6, 8):
        jrc.save(tmp_path, {"w": jnp.full(2, step)}, step=step, keep=3)
    assert saves(tmp_path) == ["jrc_4", "jrc_6", "jrc_8"]
    like = {"w": jnp.zeros(2, int)}
    assert jrc.restore(tmp_path, like)["w"].tolist() == [8, 8]
    assert jrc.restore(tmp_path, like, step=4)["w"].tolist() == [4, 4]
    jrc.save(tmp_path, {"w": jnp.full(2, 9)}, keep=2)  # without a step, the next number
    assert saves(tmp_path) == ["jrc_8", "jrc_9"]
    refused = {
        r"step must be larger than that of the last save, got 8 after 9. Give": {"step": 8},
        r"step must be a whole number from 0 to 2147483647, got -1": {"step": -1},
        r"keep must be a whole number >= 1, got 0": {"keep": 0},
    }
    for text, options in refused.items():
        with pytest.raises(ValueError, match=text):
            jrc.save(tmp_path, like, **options)
    with pytest.raises(
        FileNotFoundError, match="step must be that of a save in .*, got 4. .* 8, 9"
    ):
        jrc.restore(tmp_path, like, step=4)
    jrc.save(tmp_path, like, step=20)
    assert saves(tmp_path) == ["jrc_20"]


def test_a_save_in_the_background_is_of_the_moment_of_the_call(state, tmp_path):
    state["big"], state["numpy"] = jnp.arange(2.0**20), np.arange(3)
    for step in range(3):
        jrc.save(tmp_path, state | {"step": jnp.full(2, step)}, keep=2, wait=False)
        want = jax.tree.map(lambda x: x.copy(), state)
        state["big"] = jax.jit(lambda x: x + 1, donate_argnums=0)(state["big"])
        state["numpy"] += 1
    found = jrc.restore(tmp_path, state | {"step": jnp.zeros(2, int)})
    assert found.pop("step").tolist() == [2, 2] and same_bits(found, want)
    assert saves(tmp_path) == ["jrc_1", "jrc_2"]
    with filelock.FileLock(tmp_path / ".jrc_lock", timeout=0):
        pass


def test_what_fails_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    jrc.save(tmp_path, {"w": jnp.ones(3)})
    with monkeypatch.context() as broken:
        broken.setattr(ocp.CheckpointManager, "_finalize", fail)
        jrc.save(tmp_path, {"w": jnp.zeros(3)}, wait=False)
        with pytest.raises(OSError, match="no space left"):
            jrc.restore(tmp_path, {"w": jnp.zeros(3)})
    jrc.save(tmp_path, {"w": jnp.full(3, 2.0)})
    assert jrc.restore(tmp_path, {"w": jnp.zeros(3)})["w"].tolist() == [2, 2, 2]


KILLED = """
import os, signal, sys
import jax.numpy as jnp
import jrc
jrc.save(sys.argv[1], {"w": jnp.zeros(2**24)})
jrc.save(sys.argv[1], {"w": jnp.ones(2**24)}, wait=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_program_that_is_killed_while_it_saves_in_the_background_has_the_save_before(tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=env)
    assert killed.returncode == -signal.SIGKILL
    found = jrc.restore(tmp_path, {"w": jnp.zeros(2**24)})["w"]
    assert bool((found == found[0]).all())
    jrc.save(tmp_path, {"w": jnp.full(2, 5.0)})
    assert jrc.restore(tmp_path, {"w": jnp.zeros(2)})["w"].tolist() == [5, 5]


def test_relative_and_text_paths(state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jrc.save("run/one", state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    assert same_bits(jrc.restore(pathlib.Path("run/one"), shapes), state)


def test_onto_other_devices(tmp_path):
    mesh = Mesh(jax.devices()[:4], ("data",))
    jrc.save(tmp_path, {"w": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))})
    found = jrc.restore(tmp_path, {"w": jnp.zeros(8)})
    assert found["w"].tolist() == list(range(8)) and len(found["w"].devices()) == 1


def test_a_failed_save_leaves_the_previous_one(state, tmp_path, monkeypatch):
    jrc.save(tmp_path, {"w": jnp.ones(3)})
    with pytest.raises(
        TypeError, match="must be an array of numbers or keys, got str 'text' at 'x/y'"
    ):
        jrc.save(tmp_path, {"w": jnp.zeros(3), "x": {"y": "text"}})
    # The disk fails in the middle of the next save.
    real = ocp.args.JsonSave

    def broken(value):
        return real({"value": object()})

    monkeypatch.setattr(ocp.args, "JsonSave", broken)
    with pytest.raises(Exception):  # noqa: B017
        jrc.save(tmp_path, {"w": jnp.zeros(3)})
    monkeypatch.undo()
    assert jrc.restore(tmp_path, {"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]
    jrc.save(tmp_path, {"w": jnp.zeros(3)})
    assert jrc.restore(tmp_path, {"w": jnp.ones(3)})["w"].tolist() == [0, 0, 0]


def test_nothing_is_cast_or_cut(tmp_path):
    jrc.save(tmp_path, {"w": jnp.ones((4, 2)), "b": jnp.ones(2)})
    cases = {
        r"bfloat16\[4, 2\] for leaf 'w', which was saved as float32\[4, 2\]": {
            "w": jnp.ones((4, 2), jnp.bfloat16), "b": jnp.ones(2),
        },
        r"float32\[4\] for leaf 'b', which was saved as float32\[2\]": {
            "w": jnp.ones((4, 2)), "b": jnp.ones(4),
        },
        "leaf 'c' is not saved. Build like": {
            "w": jnp.ones((4, 2)), "b": jnp.ones(2), "c": jnp.ones(1),
        },
        "leaf 'b' is saved and not expected. Build like": {"w": jnp.ones((4, 2))},
        "leaves 'c/0', 'c/1', 'c/2' and 2 more are not saved; leaf 'b' is saved and not": {
            "w": jnp.ones((4, 2)), "c": [jnp.ones(1)] * 5,
        },
    }  # fmt: skip
    for text, like in cases.items():
        with pytest.raises(ValueError, match=text):
            jrc.restore(tmp_path, like)


def test_missing_foreign_and_damaged_saves(tmp_path):
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        jrc.restore(tmp_path / "none", {})
    (tmp_path / "bare").mkdir()
    with pytest.raises(FileNotFoundError, match="which has no complete save"):
        jrc.restore(tmp_path / "bare", {})
    assert not list((tmp_path / "bare").iterdir())
    (tmp_path / "file").write_text("")
    for call in (jrc.save, jrc.restore):
        with pytest.raises(NotADirectoryError, match="path must be a folder"):
            call(tmp_path / "file", {"w": jnp.ones(1)})
    foreign = ocp.CheckpointManagerOptions(step_prefix="jrc")
    with ocp.CheckpointManager(tmp_path / "foreign", options=foreign) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
    with pytest.raises(ValueError, match="path must hold a save of jrc.save"):
        jrc.restore(tmp_path / "foreign", {"w": jnp.ones(2)})


# A late reader of tensorstore finds orbax's event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_save(tmp_path):
    jrc.save(tmp_path, {"w": jnp.arange(4096.0)})
    for file in (tmp_path / "jrc_0" / "arrays").rglob("*"):
        if file.is_file() and "d" in file.parent.name:
            file.write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read; they may be damaged"):
        jrc.restore(tmp_path, {"w": jnp.arange(4096.0)})
    time.sleep(0.2)
    gc.collect()


def test_a_state_without_arrays(tmp_path):
    jrc.save(tmp_path, {"none": None})
    assert jrc.restore(tmp_path, {"none": None}) == {"none": None}


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "precious").write_text("")
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(2024, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
    for i in range(3):
        jrc.save(tmp_path, {"w": jnp.full(2, i)})
    assert saves(tmp_path) == ["2024", "7", "jrc_2"]
    assert jrc.restore(tmp_path, {"w": jnp.zeros(2, int)})["w"].tolist() == [2, 2]


def test_files_named_like_saves_are_ignored(tmp_path):
    jrc.save(tmp_path, {"w": jnp.ones(2)})
    (tmp_path / "jrc_9").write_text("")
    assert jrc.restore(tmp_path, {"w": jnp.zeros(2)})["w"].tolist() == [1, 1]
    jrc.save(tmp_path, {"w": jnp.full(2, 2.0)})
    assert jrc.restore(tmp_path, {"w": jnp.zeros(2)})["w"].tolist() == [2, 2]
    assert saves(tmp_path) == ["jrc_1", "jrc_9"]


class Url(os.PathLike):
    """As `etils.epath` has them."""

    def __fspath__(self):
        return "gs://bucket/run"


URLS = "gs://bucket/run", "s3://bucket/run", "file:///run", Url(), pathlib.Path("gs://bucket/run")


@pytest.mark.parametrize("path", URLS, ids=range(len(URLS)))
def test_urls_are_refused(path, tmp_path, monkeypatch):
    """They once made a local folder `gs:`."""
    monkeypatch.chdir(tmp_path)
    for call in (jrc.save, jrc.restore):
        with pytest.raises(ValueError, match="local or mounted file system, got the URL"):
            call(path, {"w": jnp.ones(2)})
    assert not list(tmp_path.iterdir())


def test_paths_of_bytes_are_refused(tmp_path):
    (tmp_path / "run").mkdir()
    with os.scandir(os.fsencode(tmp_path)) as entries:
        (entry,) = entries
    for path in (b"run", entry):
        for call in (jrc.save, jrc.restore):
            with pytest.raises(TypeError, match="path must be a str or a pathlib.Path, got"):
                call(path, {"w": jnp.ones(2)})


def test_reading_writes_nothing(tmp_path):
    jrc.save(tmp_path, {"w": jnp.ones(2)})
    running = tmp_path / "jrc_1.orbax-checkpoint-tmp"
    (running / "arrays").mkdir(parents=True)
    jrc.restore(tmp_path, {"w": jnp.ones(2)})
    assert (running / "arrays").exists()
    jrc.save(tmp_path, {"w": jnp.zeros(2)})  # the next save removes it
    assert saves(tmp_path) == ["jrc_1"]


def test_another_tree_is_an_error_although_names_agree(tmp_path):
    x = jnp.ones(2)
    pairs = [
        ({"a": {"b": x}}, {"a/b": x}),
        ([x, x], {"0": x, "1": x}),
        ({"a": None, "b": x}, {"b": x}),
        ({1: x, 2: x, 10: x}, {"1": x, "2": x, "10": x}),
    ]
    for i, (saved, like) in enumerate(pairs):
        jrc.save(tmp_path / str(i), saved)
        assert same_bits(jrc.restore(tmp_path / str(i), saved), saved)
        with pytest.raises(
            ValueError, match=r"lea(f|ves) .* (is|are) (not saved|saved and not expected)"
        ):
            jrc.restore(tmp_path / str(i), like)


@pytest.mark.parametrize(
    "value", [np.array(["text"]), np.zeros(2, object), np.zeros(2, ">f4"), 1.0, float]
)
def test_what_cannot_be_saved_is_named(value, tmp_path):
    with pytest.raises(TypeError, match="an array of numbers or keys, got .* at 'a/x'"):
        jrc.save(tmp_path, {"a": {"x": value}})
    jrc.save(tmp_path, {"a": {"x": jnp.ones(())}})
    with pytest.raises(TypeError, match="every leaf of like must be an array or .* at 'a/x'"):
        jrc.restore(tmp_path, {"a": {"x": value}})


def test_keys_without_elements(tmp_path):
    keys = {"keys": jax.random.split(jax.random.key(0), 0), "w": jnp.ones(1)}
    jrc.save(tmp_path, keys)
    assert jrc.restore(tmp_path, keys)["keys"].shape == (0,)
