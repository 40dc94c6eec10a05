"""`target=`: placement of arguments, budgets, names in reports. CPU devices stand in for others."""

import functools
import importlib.metadata
import importlib.util
import pathlib
import re
import subprocess
import sys
import threading
import types

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jrc
from jrc import cli
from jrc._targets import abstract_on, accelerator, compile_only, is_compile_only, target
from jrc._targets.compilers import compiler_versions
from jrc._targets.quiet import quiet_compiler, without_log
from jrc.train import _init_state

GIB = 2**30


@pytest.fixture
def on_cpu(monkeypatch):
    """CPU devices in the place of compile-only ones."""

    def devices(named):
        count = int(np.prod(named.dims)) * named.chip.devices_per_chip
        return tuple(jax.devices()[-count:])

    monkeypatch.setattr(accelerator, "compile_only_devices", devices)


def net(params, x):
    for w in params["w"]:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


SHAPE = jax.ShapeDtypeStruct
PARAMS = {"w": [SHAPE((16, 16), jnp.float32)] * 4}
X = SHAPE((64, 16), jnp.float32)


def test_arguments_lie_on_the_first_device(on_cpu):
    to = jrc.target("v5e:2x2")
    key = jax.random.key(0)
    args = ({"w": jnp.ones(3), "n": np.ones(2), "flag": True, "rate": 0.5}, "train", key, None)
    placed = abstract_on(to, args)
    leaves = [placed[0]["w"], placed[0]["n"], placed[2]]
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    assert all(x.sharding.device_set == {to.devices[0]} for x in leaves)
    assert placed[0]["flag"] is True and placed[0]["rate"] == 0.5 and placed[1] == "train"
    assert placed[2].dtype == key.dtype and placed[0]["n"].dtype == jnp.float32


def test_shardings_over_the_target_are_kept(on_cpu):
    to = jrc.target("v5e:2x2")
    rows = NamedSharding(jax.make_mesh((4,), ("data",), devices=to.devices), PartitionSpec("data"))
    w, x = abstract_on(to, (jnp.ones((2, 2)), SHAPE((8, 2), jnp.float32, sharding=rows)))
    assert x.sharding == rows
    assert w.sharding.device_set == set(to.devices) and w.sharding.is_fully_replicated


def test_one_device_of_several_may_be_chosen(on_cpu):
    to = jrc.target("v5e:2x2")
    x = SHAPE((8,), jnp.float32, sharding=SingleDeviceSharding(to.devices[2]))
    w, x = abstract_on(to, (jnp.ones(2), x))
    assert w.sharding.device_set == x.sharding.device_set == {to.devices[2]}


def test_shardings_over_other_devices_are_refused(on_cpu):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = SHAPE((8, 2), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    rule = r"arguments must be sharded over devices of the target 'v5e:2x2', got '0/x' over 4 of"
    with pytest.raises(ValueError, match=rule):
        abstract_on(jrc.target("v5e:2x2"), ({"x": x},))
    to = jrc.target("v5e:2x2")
    half, whole = (Mesh(np.array(to.devices[:n]), ("data",)) for n in (2, 4))
    both = [
        SHAPE((8,), jnp.float32, sharding=NamedSharding(m, PartitionSpec())) for m in (half, whole)
    ]
    with pytest.raises(ValueError, match="must be sharded over the same devices"):
        abstract_on(to, tuple(both))


def test_a_plan_for_a_target_needs_no_budget(on_cpu):
    plan = jrc.plan(net, PARAMS, X, target="v5e")
    assert plan.budget == int(0.9 * 16 * GIB) and not plan.reruns
    assert " on one device of v5e:1 (compiled; budget 14.4 GiB)" in str(plan).splitlines()[0]
    assert jrc.Plan.from_json(plan.to_json()) == plan and plan.target == "v5e:1"
    lean = jrc.plan(net, PARAMS, X, target=jrc.target("v5e"), budget=0.0)
    assert lean.verified.peak_bytes < plan.verified.peak_bytes
    small = {"w": [jnp.ones((16, 16))] * 4}, jnp.ones((64, 16))
    np.testing.assert_allclose(lean.apply(net)(*small), net(*small), rtol=1e-6)
    with pytest.raises(TypeError, match="target must be a jrc.Target, its name or None, got int"):
        jrc.plan(net, PARAMS, X, target=8)


def test_plans_of_targets_are_stored_apart(on_cpu, tmp_path):
    for name in ("v5e", "v6e", "v5e:1"):
        jrc.plan(net, PARAMS, X, target=name, budget=40_000, verify=False, cache=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_a_report_names_the_target_and_counts_one_device(on_cpu):
    to = jrc.target("h100:4")
    mesh = Mesh(np.array(to.devices), ("data",))
    sharded = SHAPE((64, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    whole, part = (jrc.explain(net, PARAMS, x, target=to) for x in (X, sharded))
    assert whole.device == part.device == "h100:4"
    assert "on h100:4\n" in str(part) and part.saved_bytes * 4 == whole.saved_bytes
    # Without a target the device is that of the arguments.
    assert jrc.explain(net, PARAMS, sharded).saved_bytes == part.saved_bytes


def test_a_module_with_shapes_can_be_planned(on_cpu):
    model = nnx.eval_shape(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)))

    def loss(model, x):
        return jnp.sum(jnp.tanh(model(x)))

    assert jrc.plan(loss, model, X, target="h100").verified.peak_bytes > 0


def test_largest_batch_of_a_target(on_cpu):
    def args(batch):
        return PARAMS, SHAPE((batch, 16), jnp.float32)

    found = jrc.largest_batch(args, net, target="v5e", multiple_of=8, most=16)
    assert (found.plain, found.recomputed) == (16, 16) and found.plan.target == "v5e:1"
    assert found.plan.budget == jrc.target("v5e").budget


def test_a_state_of_shapes(monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    tx = jrc.dgc_momentum(0.1, 0.9, 0, min_size=1, axis_name="data")
    params = {"w": jnp.ones((8, 4))}
    real = jrc.init_state(params, tx, jax.random.key(0), mesh=mesh)
    shapes = jax.eval_shape(lambda: params)
    state = jrc.init_state(shapes, tx, jax.random.key(0), mesh=mesh)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(real), strict=True):
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
    # A mesh of devices that are not there gives shapes too.
    monkeypatch.setattr(_init_state, "is_compile_only", lambda device: True)
    absent = jrc.init_state(params, tx, jax.random.key(0), mesh=mesh)
    assert jax.tree.leaves(absent) == jax.tree.leaves(state)

    def loss(params, batch, key):
        return jnp.mean((batch @ params["w"]) ** 2)

    step = jrc.make_train_step(loss, tx, mesh=mesh)
    batch = SHAPE((8, 8), jnp.float32)
    assert step.memory(state, batch) == step.memory(real, batch)


def test_a_state_of_shapes_for_one_device():
    state = jrc.init_state({"w": SHAPE((4,), jnp.bfloat16)}, optax.adamw(1e-3), jax.random.key(0))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
    assert state.opt_state[0].mu["w"].dtype == jnp.bfloat16


def test_devices_of_this_process_can_run():
    assert not is_compile_only(jax.devices()[0])


def test_a_missing_compiler_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(compile_only, "_package_of", lambda platform: None)
    for name, extra in (("v5e:2x2", "tpu"), ("h100", "cuda13")):
        with pytest.raises(ImportError) as caught:
            _ = target(name).devices
        assert str(caught.value) == (
            f"jrc.Target.devices: {name!r} must have its compiler installed, got none: "
            f"pip install '.[{extra}]' in a checkout"
        )
    assert cli.main(["plan", "net:setup", "--target", "h100"]) == 2
    assert "pip install '.[cuda13]' in a checkout" in " ".join(capsys.readouterr().err.split())


def test_a_compiler_of_another_version_is_told(monkeypatch):
    def fails(target):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(compile_only, "_package_of", lambda platform: "jax-cuda13-plugin")
    monkeypatch.setattr(compile_only, "_devices", fails)
    versions = f"Installed are jax {jax.__version__}, jaxlib {importlib.metadata.version('jaxlib')}"
    with pytest.raises(RuntimeError, match="topology not implemented") as caught:
        _ = target("h100").devices
    text = str(caught.value)
    assert versions in text and text.endswith("pip install -U '.[cuda13]' in a checkout.")


def test_all_compilers_have_versions(monkeypatch, tmp_path):
    names = "jax", "jaxlib", "libtpu", "jax_cuda12_plugin", "jax-cuda12-pjrt", "jaxopt", "numpy"
    some = [types.SimpleNamespace(name=each, version="1") for each in names]
    library = tmp_path / "libtpu.so"
    library.write_text("")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: some)
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    found = ["jax", "jaxlib", str(library), "jax-cuda12-pjrt", "jax-cuda12-plugin", "libtpu"]
    assert list(compiler_versions()) == found
    assert compiler_versions()["jax"] == jax.__version__


def test_settings_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "mine")
    with compile_only._environment({"TPU_ACCELERATOR_TYPE": "ours", "TPU_LOG_DIR": "disabled"}):
        assert compile_only.os.environ["TPU_ACCELERATOR_TYPE"] == "mine"
        assert compile_only.os.environ["TPU_LOG_DIR"] == "disabled"
    assert "TPU_LOG_DIR" not in compile_only.os.environ


LOG = b"W1122 21:23:35.490409   11302 sort_rewriter.cc:798] Missing data.\nTo avoid this, do it.\n"


def test_the_log_of_a_compiler_is_dropped_and_nothing_else(capfd):
    assert without_log(b"mine\n" + LOG) == b"mine\n"
    assert without_log(b"half a li") == b"half a li"
    with quiet_compiler(), quiet_compiler():
        compile_only.os.write(2, b"mine\n")
        compile_only.os.write(2, LOG)
    compile_only.os.write(2, LOG)
    assert capfd.readouterr().err == "mine\n" + LOG.decode()


def test_a_process_that_goes_on_is_not_waited_for(capfd):
    code = "import select, sys; select.select([0], [], [], 20); sys.stderr.write('the process\\n')"
    with quiet_compiler():
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        compile_only.os.write(2, b"mine\n")
    assert process.poll() is None
    assert capfd.readouterr().err == "mine\n"
    process.communicate()
    for thread in threading.enumerate():
        if thread.name == "jrc: stderr":
            thread.join()
    assert process.returncode == 0
    assert capfd.readouterr().err == "the process\n"


def test_the_command_line_lists_targets(capsys):
    assert cli.main(["targets"]) == 0
    assert "v5e" in capsys.readouterr().out
    assert cli.main(["targets", "h100:8"]) == 0
    assert "8 devices of H100" in capsys.readouterr().out
    assert cli.main(["targets", "h1000"]) == 2
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"jrc {jrc.__version__}\n"


def test_the_command_line_plans_for_a_target(on_cpu, capsys, tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def setup(batch=64, layers=4):\n"
        "    def net(ws, x):\n"
        "        for w in ws:\n"
        "            x = jnp.tanh(x @ w)\n"
        "        return jnp.sum(x)\n"
        "    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)\n"
        "    return net, ([shape(16, 16)] * layers, shape(batch, 16))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "nets.py:setup", "--target", "v5e:2x2"]) == 0
    assert "on one device of v5e:2x2" in capsys.readouterr().out
    guess = ["plan", "nets.py:setup", "--target", "h100", "--no-verify"]
    assert cli.main([*guess, "--offload"]) == cli.main([*guess, "--offload", "28e9"]) == 0
    assert "on one device of h100 (predicted" in capsys.readouterr().out
    assert cli.main(["explain", "nets.py:setup", "--target", "h100"]) == 0
    assert "gradient of `net` on h100" in capsys.readouterr().out
    asked = ["--multiple-of", "8", "--most", "16", "--json", "found.json", "--arg", "layers=2"]
    assert cli.main(["largest-batch", "nets.py:setup", "--target", "v5e", *asked]) == 0
    assert "fit without a plan" in capsys.readouterr().out
    assert (tmp_path / "found.json").exists()
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "nets.py:setup"])
    assert "--budget must be given" in capsys.readouterr().err


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: jrc[tpu]"
)
needs_cuda = pytest.mark.skipif(
    compile_only._package_of("gpu") is None,
    reason="no CUDA plugin is installed: jrc[cuda13]",
)


@pytest.mark.parametrize(
    "name", [pytest.param("v5e:1", marks=needs_libtpu), pytest.param("h100", marks=needs_cuda)]
)
def test_the_real_compiler_plans(name):
    to = jrc.target(name)
    assert to.devices is to.devices and len(to.devices) == 1 and is_compile_only(to.devices[0])
    assert to.devices[0].platform == to.platform
    plan = jrc.plan(net, PARAMS, X, target=to, compilations=1)
    assert plan.target == name and plan.verified.peak_bytes > 0


@pytest.mark.exhaustive(after=5)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(f"v5e:{n}", marks=needs_libtpu) for n in ("2x2", "4x4")),
        *(pytest.param(n, marks=needs_libtpu) for n in ("v4:2x2x1", "v5p:2x2x2", "v6e:1")),
        pytest.param("tpu7x:2x2x1", marks=needs_libtpu),
        *(pytest.param(n, marks=needs_cuda) for n in ("a100-40", "a100-80", "h100:8x2", "h200")),
        *(pytest.param(n, marks=needs_cuda) for n in ("b200:8", "gb200", "l40s")),
    ],
)
def test_every_chip_compiles(name):
    to = jrc.target(name)
    assert len(to.devices) == to.device_count
    mesh = Mesh(np.array(to.devices), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = SHAPE((64 * to.device_count, 16), jnp.float32, sharding=rows)
    report = jrc.explain(net, PARAMS, x, target=to)
    assert report.device == name and report.memory.arguments >= 4 * (4 * 256 + 64 * 16)


@needs_libtpu
@pytest.mark.slow
def test_a_tpu_saves_what_products_alone_read_as_bfloat16():
    """The planner counts so: `value_bytes` of the compiler for TPUs."""
    count, rows, width = 6, 8192, 512

    def layers(params, x, precision):
        def layer(x, w):
            return jax.nn.gelu(jnp.matmul(x, w, precision=precision))

        for w in params["w"]:
            x = jax.checkpoint(layer)(x, w)
        return jnp.mean(x**2)

    args = {"w": [SHAPE((width, width), jnp.float32)] * count}, SHAPE((rows, width), jnp.float32)
    peaks = [
        jrc.explain(functools.partial(layers, precision=each), *args, target="v5p").memory.peak
        for each in ("default", "highest")
    ]
    # Half of each of the five results that are saved, of which a kernel may hold one whole.
    assert 4 * rows * width * 2 <= peaks[1] - peaks[0] <= 6 * rows * width * 2


def scanned(params, x):
    def step(x, w):
        return x + jnp.tanh(x @ w["a"]) @ w["b"], None

    return jnp.mean(jax.lax.scan(step, x, params)[0] ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, budget",
    [
        pytest.param("v5e:1", "700MiB", marks=needs_libtpu),
        pytest.param("h100", "800MiB", marks=needs_cuda),
    ],
)
def test_values_of_a_loop_are_moved_to_the_host(name, budget):
    params = {"a": SHAPE((6, 512, 1024), jnp.float32), "b": SHAPE((6, 1024, 512), jnp.float32)}
    args = params, SHAPE((32768, 512), jnp.float32)  # 64 MiB for each step
    ask = functools.partial(jrc.plan, scanned, *args, target=name, verify=False, chunks=False)
    with pytest.raises(jrc.BudgetError):
        ask(budget=budget)
    kept, moved = ask(budget="1GiB"), ask(budget=budget, offload=1e18)
    assert moved.predicted.host_bytes == 6 * 64 * 2**20
    reports = [jrc.explain(plan.apply(scanned), *args, target=name) for plan in (kept, moved)]
    before, after = (report.memory for report in reports)
    assert after.host == moved.predicted.host_bytes and before.host == 0
    assert after.peak < before.peak


@needs_libtpu
@pytest.mark.slow
def test_a_program_that_is_too_large_for_a_tpu_has_a_peak():
    params = {"w": [SHAPE((4096, 4096), jnp.float32)] * 4}
    report = jrc.explain(net, params, SHAPE((2**19, 4096), jnp.float32), target="v5e")
    given = 4 * (4 * 4096**2 + 2**19 * 4096)
    assert report.memory.arguments == given
    # Three of the four activations at least, beside the arguments; how many is libtpu's choice.
    assert given + 24 * GIB < report.memory.peak < given + 48 * GIB
    with pytest.raises(jrc.BudgetError) as caught:
        jrc.plan(net, params, SHAPE((2**19, 4096), jnp.float32), target="v5e", chunks=False)
    assert caught.value.least_bytes > 16 * GIB


@pytest.mark.slow
def test_the_guide_runs_as_it_stands(on_cpu):
    guide = pathlib.Path(jrc.__file__).parent.parent / "docs" / "targets.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.S)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["plan"].budget == jrc.target("v5e").budget and names["lean"].reruns
    assert names["report"].device == "v5e:2x2"
