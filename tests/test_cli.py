"""The command line: what it prints, what it writes, and how it fails."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc import cli, remat
from jrc._jaxpr import UNKNOWN, place
from jrc.cli._load_target import _recorded

NET = '''
"""A net to explain."""
import jax, jax.numpy as jnp
import jrc

def setup(layers=2, kind="tanh", text=""):
    def loss(ws, x):
        for i, w in enumerate(ws):
            x = jrc.mark(getattr(jnp, kind)(x @ w), f"layer_{i}")
        return jnp.mean(x)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    return loss, ([shape(8, 8)] * layers, shape(4, 8))

def lean(layers=2):
    loss, args = setup(layers)
    return jrc.recompute_segments(loss, [f"layer_{i}" for i in range(layers)]), args

def swapped():
    loss, (ws, x) = setup()
    return lambda x, ws: (loss(ws, x), {"x": x}), (x, ws)

def wrong():
    return setup()[0]

def loose():
    return setup()[0], setup()[1][1]

def bare():
    return setup()[0], ()

def raising():
    def loss(x):
        raise ValueError("jrc.data: no such file")
    return loss, setup()[1][1:]

def misnamed():
    loss, args = setup()
    return jrc.recompute_segments(loss, ["layr"]), args

def setting_up():
    raise TypeError("jrc.data: no table")

def vector():
    return lambda x: x, setup()[1][1:]

def step(donate=True, scale=1, upcast=False):
    def step(state, x):
        new = [w - jnp.mean(x @ w) for w in state]
        return new, jnp.sum(x)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    donated = 0 if donate else ()
    return jax.jit(step, donate_argnums=donated), ([shape(64, 64)] * 4, shape(scale * 8, 64))

def cast(upcast=False, unrolled=False):
    def loss(w, x):
        x = x.astype(jnp.float32 if upcast else x.dtype)
        layer = lambda x, _: (jnp.tanh(x @ w.astype(x.dtype)), None)
        if unrolled:
            for _ in range(8):
                x, _ = layer(x, None)
        else:
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, None, length=8)
        return jnp.mean(x).astype(jnp.float32)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    return loss, (shape(32, 32), shape(512, 32))

def sorting():
    wide = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    return (lambda x: jnp.sort(x, axis=-1)[:, ::2].sum(1)), (wide,)

def rows():
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4096, 8))]
    return (lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)), args

def batch(n):
    def loss(w, x):
        assert x.shape[0] == n
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.sum(x) / n
    return loss, (setup()[1][0][0], jax.ShapeDtypeStruct((n, 8), jnp.float32))
'''


@pytest.fixture
def net(tmp_path, monkeypatch):
    """A folder with `net_to_see.py` in it, in which the command runs."""
    (tmp_path / "net_to_see.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("net_to_see", None)
    yield tmp_path
    sys.modules.pop("net_to_see", None)


def run(capsys, *argv):
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_explain_prints_the_report_and_writes_it(net, capsys):
    code, out, err = run(
        capsys, "explain", "net_to_see:setup", "--arg", "layers=3", "--json", "r.json",
        "--plot", "r.png",
    )  # fmt: skip
    report = jrc.Report.from_json((net / "r.json").read_text())
    assert (code, err) == (0, "") and out == f"{report}\n"
    assert list(report.by_mark) == ["layer_0", "layer_1"] and report.name == "loss"
    assert (net / "r.png").read_bytes().startswith(b"\x89PNG")


def test_what_helps_is_compiled(net, capsys):
    words = ["net_to_see:step", "--arg", "donate=False", "--argnums", "none", "--json", "r.json"]
    code, out, _ = run(capsys, "explain", *words, "--try-remedies")
    first = jrc.Report.from_json((net / "r.json").read_text()).remedies[0]
    assert code == 0 and first.is_compiled and "donate_argnums=(0,)" in first.text
    assert ", compiled\n" in out
    code, out, _ = run(capsys, "plan", *words[:-2], "--budget", "1MiB")  # its own method `lower`
    assert code == 0 and "1 MiB" in out


def test_two_functions_side_by_side(net, capsys):
    code, out, _ = run(capsys, "explain", "net_to_see.py:setup", "--compare", "net_to_see.py:lean")
    head = next(line.split() for line in out.splitlines() if "change" in line)
    assert code == 0 and head == ["setup", "lean", "change", "ratio"]
    assert out.startswith("setup: gradient of `loss`") and "\nlean: gradient of `loss`" in out


def test_a_file_for_each_of_two_reports(net, capsys):
    both = ("net_to_see.py:setup", "--compare", "net_to_see.py:lean")
    assert run(capsys, "explain", *both, "--json", "r.json")[0] == 0
    reports = [jrc.Report.from_json((net / f"r-{x}.json").read_text()) for x in ("setup", "lean")]
    assert reports[0] != reports[1] and not (net / "r.json").exists()
    equal = ("net_to_see.py:setup", "--compare", "net_to_see:setup")
    assert run(capsys, "explain", *equal, "--json", "r.json")[0] == 0
    assert (net / "r-1.json").exists() and (net / "r-2.json").exists()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("target", "before", "after", "cause"),
    [
        ("step", ["--argnums", "none"], ["--arg", "donate=False"], "aliased"),
        ("cast", [], ["--arg", "upcast=True"], "net_to_see.py"),
        ("cast", [], ["--arg", "unrolled=True"], "net_to_see.py"),
    ],
)
def test_a_peak_that_grew(net, capsys, target, before, after, cause):
    """A lost donation, a cast to float32, a loop that is unrolled: what CI is to see."""
    file = str(net / "base.json")
    words = ["explain", f"net_to_see:{target}", *before]
    assert run(capsys, *words, "--json", file)[0] == 0
    code, out, err = run(capsys, *words, "--against", file)
    assert (code, err) == (0, "")
    code, out, err = run(capsys, *words, *after, "--against", file)
    table = out[out.rindex("ratio", 0, out.rindex("arguments")) :]
    # A long name of a file is broken where the column ends.
    assert code == 1 and cause[:10] in table
    assert err.startswith("jrc explain: the peak of ") and "more than the tolerance of" in err
    assert run(capsys, *words, *after, "--against", file, "--tolerance", "1GiB")[0] == 0
    assert run(capsys, *words, *after, "--against", file, "--tolerance", "1000%")[0] == 0


def test_versions_that_differ_are_told(net, capsys):
    file = net / "base.json"
    run(capsys, "explain", "net_to_see:setup", "--json", str(file))
    data = json.loads(file.read_text())
    report = remat.Report.from_json(file.read_text())
    assert data["peak"] == report.memory.peak
    old = dataclasses.replace(report, versions=("jax 0.9.0", *report.versions[1:]))
    file.write_text(old.to_json())
    _, out, _ = run(capsys, "explain", "net_to_see:setup", "--against", str(file))
    assert f"{file} was made with jax 0.9.0" in out.replace("\n", " ")


def test_a_lost_donation_is_told(net, capsys):
    words = ["explain", "net_to_see:step", "--argnums", "none"]
    lost = "64 KiB of arguments are no longer donated (donate_argnums)"
    assert run(capsys, *words, "--json", "base.json")[0] == 0
    assert lost not in run(capsys, *words, "--against", "base.json")[1]
    assert lost in run(capsys, *words, "--arg", "donate=False", "--against", "base.json")[1]


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize(
    ("words", "was"),
    [
        (["net_to_see:step", "--argnums", "none"], "`step` with --argnums none on "),
        (["net_to_see:setup", "--argnums", "0,1"], "`loss` with --argnums 0,1 on "),
        (["net_to_see:setup", "--argnums", "1"], "`loss` with --argnums 1 on "),
    ],
)
def test_a_base_of_something_else_is_refused(net, capsys, words, was):
    assert run(capsys, "explain", "net_to_see:setup", "--json", "base.json")[0] == 0
    before = (net / "base.json").read_text()
    code, out, err = run(capsys, "explain", *words, "--against", "base.json", "--json", "base.json")
    rule = f"jrc explain: --against must be an earlier report of {was}"
    assert code == 2 and out == "" and err.startswith(rule)
    assert "got base.json, which is of `loss` with --argnums 0 on " in err and "Give the opt" in err
    assert (net / "base.json").read_text() == before
    assert run(capsys, "explain", "net_to_see:setup", "--against", "base.json")[0] == 0


def test_a_base_of_another_target_is_refused(net, capsys, two_compilers):
    words = ("explain", "net_to_see:setup", "--target")
    assert run(capsys, *words, "v5e", "--json", "base.json")[0] == 0
    code, _, err = run(capsys, *words, "h100", "--against", "base.json")
    assert code == 2 and "on h100, got base.json, which is of" in err and "on v5e:1." in err


BOTH = ("explain", "net_to_see:setup", "--target", "v5e, h100")


@pytest.fixture
def two_compilers(monkeypatch):
    """Targets without their compilers: each needs so many bytes more than a CPU."""
    more = {"v5e:1": 0, "h100": 2**20}
    explained = remat.explain

    def explain(fn, *args, target, **asked):
        report = explained(fn, *args, **asked)
        most = report.memory.temporaries + more[target]
        memory = dataclasses.replace(report.memory, temporaries=most)
        return dataclasses.replace(report, memory=memory, device=target)

    monkeypatch.setattr("jrc.cli._commands.target_option", lambda name: {"target": name})
    monkeypatch.setattr("jrc.remat.explain", explain)
    return more


@pytest.mark.slow
def test_a_gate_for_several_targets(net, capsys, two_compilers):
    code, out, _ = run(capsys, *BOTH, "--json", "base.json")
    data = json.loads((net / "base.json").read_text())
    assert code == 0 and data["format"] == "jrc.Reports/1" and list(data["reports"]) == [
        "v5e:1", "h100",
    ]  # fmt: skip
    assert "gradient of `loss` on v5e:1\n" in out and "gradient of `loss` on h100\n" in out
    code, out, err = run(capsys, *BOTH, "--against", "base.json")
    assert (code, err) == (0, "") and "\non v5e:1:\n" in out and "\non h100:\n" in out
    two_compilers["h100"] += 2**20
    code, out, err = run(capsys, *BOTH, "--against", "base.json")
    assert code == 1 and err.startswith("jrc explain: the peak of `loss` grew on h100 from 1.00")
    assert "v5e" not in err and "The tables above say where." in err
    assert run(capsys, *BOTH, "--against", "base.json", "--tolerance", "1MiB")[0] == 0
    # One of them alone is compared with its own.
    one = ("explain", "net_to_see:setup", "--against", "base.json", "--target")
    assert run(capsys, *one, "v5e")[0] == 0
    code, _, err = run(capsys, *one, "h100")
    assert code == 1 and "grew on h100 from" in err and "The table above says where." in err
    two_compilers["v5e:1"] += 2**20
    _, _, err = run(capsys, *BOTH, "--against", "base.json")
    assert "grew on v5e:1 from" in err and ", and on h100 from" in err


def test_a_file_without_a_report_of_each_target(net, capsys, two_compilers):
    one = ("explain", "net_to_see:setup", "--target")
    run(capsys, *one, "v5e", "--json", "one.json")
    assert jrc.Report.from_json((net / "one.json").read_text()).device == "v5e:1"
    run(capsys, *BOTH, "--json", "two.json")
    (net / "none.json").write_text('{"format": "jrc.Reports/1", "reports": []}')
    for argv, text in (
        ((*BOTH, "--against", "one.json"),
         "must have a report of each target, got one.json, which is one report, on v5e:1. Write it "
         "again with --target v5e:1,h100 --json one.json."),
        ((*one, "h200", "--against", "two.json"),
         "got two.json, which has 'v5e:1', 'h100' and not 'h200'. Write it again with --target"),
        (("explain", "net_to_see:setup", "--against", "two.json"),
         "--target must be given where --against has reports of targets, got none and two.json "
         "with 'v5e:1', 'h100'. Write --target v5e:1,h100."),
        ((*BOTH, "--against", "none.json"), "--against: none.json: text must be what"),
    ):  # fmt: skip
        code, out, err = run(capsys, *argv)
        assert (code, out) == (2, "") and text in err and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("libtpu", "jax_cuda13_plugin"))),
    reason="a compiler is not installed: pip install -e '.[tpu,cuda13]'",
)
def test_a_gate_for_two_compilers(net):
    words = ("explain", "net_to_see:cast", "--target", "v5e,h100")
    assert as_a_module(*words, "--json", "base.json").returncode == 0
    done = as_a_module(*words, "--arg", "upcast=True", "--against", "base.json")
    assert done.returncode == 1 and "grew on h100 from" in done.stderr


def test_gradient_options_and_words(net, capsys):
    options = ("--argnums", "1", "--has-aux", "--json", "r.json")
    assert run(capsys, "explain", "net_to_see:swapped", *options)[0] == 0
    swapped = jrc.Report.from_json((net / "r.json").read_text())
    words = ("--arg", "kind=sin", "--arg", "text='two words'", "--json", "s.json")
    assert run(capsys, "explain", "net_to_see:setup", *words)[0] == 0
    sines = jrc.Report.from_json((net / "s.json").read_text())
    assert {value.primitive for value in swapped.saved} == {"tanh", "one_minus_square"}
    assert {value.primitive for value in sines.saved} == {"sin", "cos"}


def test_each_batch_has_its_own_function(net, capsys):
    options = ("--budget", "64KiB", "--most", "64", "--multiple-of", "8", "--json", "b.json")
    code, out, err = run(capsys, "largest-batch", "net_to_see:batch", *options)
    assert (code, err) == (0, "") and "fit without a plan" in out
    assert json.loads((net / "b.json").read_text())["recomputed"] == 64
    with pytest.raises(SystemExit):
        cli.main(["largest-batch", "--help"])
    assert "The batch is its first argument" in capsys.readouterr().out


def test_no_batch_that_fits_is_a_failure(net, capsys):
    options = ("--budget", "64B", "--json", "none.json")
    code, out, err = run(capsys, "largest-batch", "net_to_see:batch", *options)
    assert (code, out) == (1, "")
    assert err.startswith("jrc largest-batch: None fits: the smallest batch needs")
    assert json.loads((net / "none.json").read_text())["recomputed"] == 0


def test_no_file_of_the_command_line_is_a_source_line():
    (eqn,) = jax.make_jaxpr(_recorded(jnp.sin, []))(1.0).eqns
    assert place(eqn) == UNKNOWN


@pytest.mark.parametrize(
    "words, rate", [((), False), (("--offload",), True), (("--offload", "28e9"), 28e9)]
)
def test_the_largest_batch_may_use_the_hosts_memory(net, capsys, monkeypatch, words, rate):
    asked = {}

    class Found(str):
        plan = "of the largest batch"

    def largest(make_args, fn, **options):
        asked.update(options)
        return Found("found")

    monkeypatch.setattr("jrc.remat.largest_batch", largest, raising=False)
    code, out, _ = run(capsys, "largest-batch", "net_to_see:batch", "--budget", "1GiB", *words)
    assert (code, out) == (0, "found\n") and asked["offload"] == rate


def test_a_function_that_is_no_gradient_is_not_taken_for_one(net, capsys):
    code, _, err = run(capsys, "explain", "net_to_see:vector")
    assert code == 2 and "must return" in err and "jax.grad" not in err


@dataclasses.dataclass
class FakePlan:
    asked: dict

    def __str__(self):
        return f"plan for {self.asked['budget']!r}"

    def to_json(self):
        return json.dumps(self.asked)


@pytest.mark.parametrize(
    "text, budget",
    [("2GiB", "2GiB"), ("1000", 1000), ("0.5", 0.5), ("1.0", 1.0)]
    + [("1e9", "1e9"), ("1.5E+3", "1.5E+3"), ("2.e9", "2.e9"), ("2.", 2.0), ("1e-1", 0.1)],
)
def test_plan_asks_for_the_budget(net, capsys, monkeypatch, text, budget):
    plan = lambda fn, *args, **asked: FakePlan({**asked, "args": len(args)})  # noqa: E731
    monkeypatch.setattr("jrc.remat.plan", plan, raising=False)
    code, out, _ = run(
        capsys, "plan", "net_to_see:setup", "--budget", text, "--json", "p.json", "--no-verify"
    )
    assert (code, out) == (0, f"plan for {budget!r}\n")
    asked = json.loads((net / "p.json").read_text())
    assert asked == {
        "budget": budget, "verify": False, "argnums": 0, "has_aux": False, "args": 2,
        "respect_checkpoints": False, "cache": None, "offload": False,
        "minimize": "time", "measure": False, "reserve": None,
    }  # fmt: skip


def test_several_budgets_make_one_table_and_a_file_each(net, capsys):
    options = ("--json", "p.json", "--no-verify", "--arg", "layers=4")
    code, out, err = run(capsys, "plan", "net_to_see:setup", "--budget", "3kB, 1MiB,0.5", *options)
    rows = [line.split("  ") for line in out.splitlines()[2:]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert (code, err) == (0, "") and out.splitlines()[0].split()[:3] == ["budget", "plan", "peak"]
    assert [row[0].split(" = ")[0] for row in cells] == ["3kB", "1MiB", "0.5"]
    assert cells[1][1:2] + cells[1][4:] == ["baseline", "1.000 x", "0"]
    assert cells[1][2].startswith("~") and cells[1][3].endswith("s")
    names = sorted(path.name for path in net.glob("*.json"))
    assert names == ["p-0.5.json", "p-1MiB.json", "p-3kB.json"]
    plans = {name: jrc.Plan.from_json((net / name).read_text()) for name in names}
    assert not plans["p-1MiB.json"].reruns and plans["p-3kB.json"].budget == 3000
    loss, args = sys.modules["net_to_see"].setup(4)
    assert jrc.plan(loss, *args, budget=0.5, verify=False) == plans["p-0.5.json"]


def test_several_budgets_of_which_some_cannot_be_met(net, capsys):
    options = ("--budget", "10B,1MiB,20B", "--json", "p.json", "--no-verify")
    code, out, err = run(capsys, "plan", "net_to_see:setup", *options)
    assert code == 1 and out.count("none fits") == 2 and "baseline" in out
    assert err.startswith("jrc plan: the least peak") and "the budget is 10 B." in err
    assert [path.name for path in net.glob("*.json")] == ["p-1MiB.json"]


def test_several_budgets_of_which_some_need_chunks(net, capsys):
    words = ("plan", "net_to_see:rows", "--no-verify", "--json", "p.json", "--budget")
    code, out, err = run(capsys, *words, "300kB,8MiB")
    above, _, *in_chunks, whole = (line[len("budget ") :] for line in out.splitlines())
    cells = [line[above.index("plan") :].split("  ")[0] for line in (*in_chunks, whole)]
    name = " ".join(" ".join(cells[:-1]).split())
    assert (code, err, cells[-1]) == (0, "", "baseline")
    plan = jrc.Plan.from_json((net / "p-300kB.json").read_text())
    (chosen,) = (each for each in plan.candidates if each.is_chosen)
    assert name == f"{chosen.name}; the whole loss in {plan.chunks[0].chunks} chunks"
    assert chosen.name == "nothing recomputed"
    assert [each.name for each in plan.candidates].count("baseline") == 1
    baseline, shown = plan.candidates[-1], str(plan).splitlines()
    assert baseline.name == "baseline" and baseline.cost.peak_bytes > plan.budget
    (line,) = (line for line in shown if " baseline " in line and "x those" not in line)
    assert line.split()[0] == "baseline"  # neither one of the row nor a manual plan


def test_several_budgets_of_a_function_as_it_is(net, capsys):
    words = ("plan", "net_to_see:sorting", "--argnums", "none", "--budget")
    code, out, err = run(capsys, *words, "8MiB,1.5MiB")
    assert (code, err) == (0, "") and "baseline" in out and "1 region in " in out


@pytest.mark.parametrize("text", ["1MiB,", "1MiB,2GB/s", "1MiB,2.5", "0.5,1"])
def test_each_of_several_budgets_is_checked_first(net, capsys, text):
    code, out, err = run(capsys, "plan", "no_such_module:setup", "--budget", text)
    assert (code, out) == (2, "") and err.startswith("jrc plan: ") and "budget" in err


@pytest.mark.slow
def test_plans_that_share_their_programs_are_those_of_single_calls(net):
    sys.path.insert(0, str(net))
    import net_to_see

    loss, args = net_to_see.setup(6)
    budgets = [0.0, 0.5, "3000", 1.0]
    shared = remat.plan_for_each(loss, *args, budgets=budgets)
    for budget, found in zip(budgets, shared, strict=True):
        try:
            assert found == jrc.plan(loss, *args, budget=budget)
        except jrc.BudgetError as error:
            assert str(error) == str(found) and error.least_bytes == found.least_bytes


@pytest.mark.parametrize("text", ["it does not fit.", "The least is 12,345 bytes."])
def test_a_budget_that_cannot_be_met(net, capsys, monkeypatch, text):
    def plan(*_, **__):
        raise jrc.BudgetError(f"jrc.plan: {text}", 12345, None)

    monkeypatch.setattr("jrc.remat.plan", plan, raising=False)
    code, out, err = run(capsys, "plan", "net_to_see:setup", "--budget", "1KiB")
    assert (code, out) == (1, "") and err.count("\n") == 1 and err.count("12,345 bytes") == 1
    assert err.startswith(f"jrc plan: {text}")


def test_the_least_peak_is_printed_once_in_both_forms(net, capsys):
    code, out, err = run(capsys, "plan", "net_to_see:setup", "--budget", "100B", "--no-verify")
    assert (code, out) == (1, "") and err.count("bytes)") == 1 and "The least is" not in err


def test_a_number_of_compilations(net, capsys, monkeypatch):
    plan = lambda fn, *args, **asked: FakePlan(asked)  # noqa: E731
    monkeypatch.setattr("jrc.remat.plan", plan)
    options = ("--budget", "1kB", "--compilations", "7", "--json", "p.json")
    options += ("--cache", "plans", "--respect-checkpoints")
    assert run(capsys, "plan", "net_to_see:setup", *options)[0] == 0
    asked = json.loads((net / "p.json").read_text())
    assert asked["compilations"] == 7
    assert asked["cache"] == "plans" and asked["respect_checkpoints"] is True


@pytest.mark.parametrize(
    "path, more",
    [("r.json", ["--json", "r.json"]), ("r.png", ["--plot", "r.png"])],
)
def test_a_failed_command_leaves_old_results(net, capsys, path, more):
    (net / path).write_text("before")
    assert run(capsys, "explain", "net_to_see:vector", *more)[0] == 2
    assert run(capsys, "explain", "net_to_see:setup", *more, "--compare", "no:no")[0] == 2
    assert (net / path).read_text() == "before"


def test_paths_are_checked_before_anything_is_compiled(net, capsys, monkeypatch):
    monkeypatch.setattr("jrc.remat.explain", lambda *_, **__: pytest.fail("it works"))
    for option in (["--json", "no/r.json"], ["--plot", "r.hat"], ["--plot", "no/r.png"]):
        assert run(capsys, "explain", "net_to_see:setup", *option)[0] == 2


WRONG = {
    ("explain", "net_to_see:step"): (
        2,
        "Plan the loss, jrc plan with --reserve, and call plan.apply(loss) in the step; --argnums "
        "none takes the step as it is.",
    ),
    ("explain", "net_to_see:setup", "--target", "h100, h100:1"): (
        2,
        "--target must name each accelerator once, got h100, h100. Leave one out.",
    ),
    ("explain", "net_to_see:setup", "--target", "h100,"): (2, "must begin with one of"),
    (*("explain", "net_to_see:setup", "--compare", "net_to_see:lean"), "--target", "v5e,h100"): (
        2,
        "--compare must go with one --target, got v5e:1, h100. Leave out all but one.",
    ),
    ("plan", "net_to_see:setup", "--target", "v5e,h100"): (
        2,
        "--target must be one accelerator, got v5e:1, h100. Run `jrc plan` once for each.",
    ),
    ("largest-batch", "net_to_see:batch", "--target", "v5e,h100"): (
        2,
        "--target must be one accelerator, got v5e:1, h100. Run `jrc largest-batch` once for each",
    ),
    ("explain", "net_to_see"): (2, "must be module:function or file.py:function, got 'net_to_see'"),
    ("explain", "net_to_see:setop"): (2, "got 'setop', which net_to_see has not (did you mean 'se"),
    ("explain", "nowhere:setup"): (2, "must name a module that can be imported, got 'nowhere'"),
    ("explain", "nowhere.py:setup"): (2, "must name a file that exists, got 'nowhere.py'"),
    ("explain", "net_to_see:wrong"): (2, "must return (fn, args), a function and the tuple of its"),
    ("explain", "net_to_see:loose"): (2, "got (function, ShapeDtypeStruct) from net_to_see:loose."),
    ("explain", "net_to_see:bare"): (
        2,
        "the 0 arguments given to `loss`, got 0. Pass its",
    ),
    ("explain", ".net_to_see:setup"): (2, "can be imported, got '.net_to_see', which is neither"),
    ("plan", "net_to_see:setup", "--budget", "2 GB/s"): (
        2,
        "must be a number and a unit, such as '1.5G",
    ),
    ("explain", "net_to_see:vector"): (2, "jrc explain: `<lambda>` must return a floating scalar"),
    ("explain", "net_to_see:setup", "--arg", "layers"): (2, "--arg must be KEY=VALUE, such as la"),
    ("explain", "net_to_see:setup", "--arg", "layers=1 2"): (
        2,
        "must be a Python literal or a word",
    ),
    ("explain", "net_to_see:setup", "--argnums", "a"): (2, "--argnums must be one position or"),
    ("explain", "net_to_see:setup", "--argnums", "7"): (2, "argnums must be positions of the 2"),
    ("explain", "net_to_see:setup", "--json", "no/r.json"): (2, "got 'no/r.json'. Make 'no' first"),
    ("explain", "net_to_see:setup", "--json", "."): (
        2,
        "--json: path must be a file, got the folder '.'",
    ),
    ("explain", "net_to_see:setup", "--plot", "no/r.png"): (2, "got 'no/r.png'. Make 'no' first"),
    ("explain", "net_to_see:setup", "--plot", "r.hat"): (2, "--plot: path must end in a format"),
    ("plan", "net_to_see:setup", "--budget", "0"): (2, "a number of bytes. Write 0.0 for the frac"),
    ("plan", "net_to_see:setup", "--budget", "1"): (2, "a number of bytes. Write 1.0 for the frac"),
    ("plan", "net_to_see:setup", "--budget", "1.5"): (2, "jrc plan: budget as a float must be"),
    ("plan", "net_to_see:setup", "--budget", "1MB", "--compilations", "0"): (
        2,
        "jrc plan: compilations must be a whole number from 1 to 10, got 0.",
    ),
    ("plan", "net_to_see:setup", "--budget", "1MB", "--json", "no/p.json"): (
        2,
        "--json: path must be in a folder that exists, got 'no/p.json'. Make 'no' first.",
    ),
    ("explain", "net_to_see:setup", "--arg", "kind=hat"): (1, "AttributeError: module 'jax.numpy'"),
    ("explain", "net_to_see:setup", "--arg", "depth=2"): (1, "TypeError: setup() got an unexpec"),
    # The text is jrc's; the failure is the function's.
    ("explain", "net_to_see:raising"): (1, "ValueError: no such file"),
    ("explain", "net_to_see:misnamed"): (1, "'layr' (did you mean 'layer_"),
    ("explain", "net_to_see:setting_up"): (1, "TypeError: no table"),
    ("plan", "net_to_see:raising", "--budget", "1MB"): (1, "ValueError: no such file"),
}


@pytest.mark.parametrize("argv", WRONG)
def test_errors_are_one_line(net, capsys, argv):
    code, text = WRONG[argv]
    found, out, err = run(capsys, *argv)
    assert found == code and text in err and err.startswith(f"jrc {argv[0]}: ")
    assert err.count("\n") == 1 and "Traceback" not in err and out == ""
    assert ("--debug shows where" in err) == (code == 1)
    assert "Traceback" in run(capsys, *argv, "--debug")[2]


def test_a_file_named_like_a_module_replaces_none(net, capsys):
    """`random.py` once became everybody's `random`."""
    import random

    (net / "random.py").write_text(NET)
    (net / "other").mkdir()
    (net / "other" / "random.py").write_text(NET.replace('kind="tanh"', 'kind="sin"'))
    for path in ("random.py", "other/random.py"):
        assert run(capsys, "explain", f"{path}:setup")[0] == 0
    assert sys.modules["random"] is random and hasattr(random, "gauss")


DATACLASS = """
import dataclasses, pickle
import jax.numpy as jnp

@dataclasses.dataclass
class Config:
    size: int = 3

def setup():
    size = pickle.loads(pickle.dumps(Config())).size
    return jnp.sum, (jnp.ones(size),)
"""


def test_a_file_may_define_classes_that_are_looked_up_by_module(net, capsys):
    (net / "sizes.py").write_text(DATACLASS)
    assert run(capsys, "explain", "sizes.py:setup")[0] == 0


@pytest.mark.parametrize("argv", [[], ["plan", "net:setup"], ["explode"]])
def test_argparse_s_own_errors(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2 and "usage: jrc" in capsys.readouterr().err


def test_help_shows_how(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for line in (
        "jrc explain net:setup --arg layers=12 --plot memory.png --json report.json",
        "jrc plan net:setup --budget 2GiB --json plan.json",
        "Exit codes: 0 done, 1 the budget cannot be met or the function failed",
    ):
        assert line in out


def test_a_function_as_it_is_is_drawn(net, capsys):
    words = ("explain", "net_to_see:step", "--argnums", "none")
    assert run(capsys, *words, "--plot", "r.png")[0] == 0
    assert (net / "r.png").read_bytes().startswith(b"\x89PNG")
    text = "def none(): return lambda x: None, setup()[1][1:]"
    (net / "net_to_see.py").write_text(f"{NET}\n{text}\n")
    words = ("explain", "net_to_see.py:none", "--argnums", "none", "--plot", "s.png")
    code, _, err = run(capsys, *words)
    assert code == 2 and err.startswith("jrc explain: report must have live bytes to be drawn")
    assert not (net / "s.png").exists()


def as_a_module(*argv):
    root = os.path.dirname(os.path.dirname(jrc.__file__))
    return subprocess.run(
        [sys.executable, "-m", "jrc", *argv],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, check=False,
    )  # fmt: skip


def test_a_platform_that_is_not_there_is_one_line(net):
    done = as_a_module("explain", "net_to_see:setup", "--platform", "nowhere")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--platform must be one that JAX can start here, got 'nowhere': Unable" in done.stderr


@pytest.mark.slow
def test_a_platform_that_is_there_is_used(net):
    done = as_a_module("explain", "net_to_see:setup", "--platform", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
