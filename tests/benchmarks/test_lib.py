"""The library that benchmarks share: command line, report files, tables, child processes."""

import dataclasses
import doctest
import functools
import json
import time

import jax
import jax.numpy as jnp
import pytest

import jrc
from benchmarks._lib import child, gradient, table
from benchmarks._lib.command import Benchmark, at_least, names_of
from benchmarks._lib.report import opened
from benchmarks._lib.table import Table
from benchmarks._lib.timing import quartiles, ratios
from benchmarks._private import in_turns
from jrc.models import gpt


def one_table(report):
    return [Table("Figures", ("", "ms"), [("a", str(report["figure"]))])]


def benchmark(measure, **fields):
    def options(parser):
        parser.add_argument("--names", type=names_of(["a", "b"]), default=["a"])
        parser.add_argument("--count", type=at_least(1), default=7)

    return Benchmark("test.one", "Measure.", measure, one_table, options, **fields)


def measure(run):
    run.report |= run.about() | {"figure": run.options.count}


def test_a_run_writes_its_report_and_prints_its_tables(tmp_path, capsys):
    out = tmp_path / "one.json"
    report = benchmark(measure, toy={"count": 3}).main(["--toy", "--out", str(out)])
    assert json.loads(out.read_text()) == report
    assert report["figure"] == 3 and report["toy"] is True and report["cores"] >= 1
    assert report["settings"] == {"names": ["a"], "count": 3, "toy": True}
    assert "Figures" in capsys.readouterr().out


def test_broken_promises_are_an_exit_status(capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark(measure, problems=lambda report: ["too slow"]).main([])
    assert stopped.value.code == 1 and "broken: too slow" in capsys.readouterr().out


def test_toy_and_full_figures_do_not_mix(tmp_path):
    out = tmp_path / "one.json"
    keeping = benchmark(measure, keys=("figure",))
    keeping.main(["--out", str(out)])
    with pytest.raises(SystemExit, match="must name a file of toy figures, got .* with full ones"):
        keeping.main(["--toy", "--out", str(out)])


def test_an_interrupt_keeps_what_was_saved(tmp_path, capsys):
    def stopped(run):
        run.report["figure"] = 1
        run.save()
        raise KeyboardInterrupt

    out = tmp_path / "one.json"
    with pytest.raises(SystemExit) as exit:
        benchmark(stopped, keys=("figure",)).main(["--out", str(out)])
    assert exit.value.code == 130 and json.loads(out.read_text())["figure"] == 1
    assert "the same command continues" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--names", "a,c", "must be some of a, b, got c."),
        ("--count", "0", "must be a whole number >= 1, got 0."),
        ("--count", "-1.5", "must be a whole number >= 1, got -1.5."),
    ],
)
def test_wrong_options_are_refused(option, value, text, capsys):
    with pytest.raises(SystemExit):
        benchmark(measure).main([f"{option}={value}"])
    assert f"argument {option}: {text}" in capsys.readouterr().err


def test_a_report_is_continued(tmp_path):
    path = tmp_path / "report.json"
    assert opened(None, "dgc.costs", "toy") == {} == opened(path, "dgc.costs", "toy")
    path.write_text('{"toy": true}')
    assert opened(path, "dgc.costs", "toy") == {"toy": True}


@pytest.mark.parametrize("text", ["[1, 2", "", "[]", "3", '{"foo": 1}'])
def test_a_file_of_something_else_is_refused_and_stays(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="^dgc.costs: --out must name a .*report.json .*Choose an"):
        opened(path, "dgc.costs", "toy")
    assert path.read_text() == text


def test_the_docstring_of_the_table_runs():
    assert doctest.testmod(table).failed == 0


def test_a_table_has_equal_cells_in_both_forms(capsys):
    one = Table("Title [a]", ("", "MiB"), [("row [b]", "1.0")])
    rich = one.terminal()
    assert [column.justify for column in rich.columns] == ["left", "right"]
    assert one.markdown() == "Title [a]:\n\n|  | MiB |\n|---|---|\n| row [b] | 1.0 |\n"
    assert Table("", ("a",), [("b",)]).markdown() == "| a |\n|---|\n| b |\n"


def test_programs_take_turns():
    calls = []
    programs = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = in_turns(programs, 3, warm_up=1)
    assert calls == ["a", "b"] * 4 and [len(x) for x in seconds.values()] == [3, 3]
    assert quartiles([1.0, 2.0, 3.0]) == [1.5, 2.0, 2.5]
    assert ratios([2.0, 3.0], [1.0, 2.0]) == [2.0, 1.5]


def test_a_failing_child_raises_with_its_errors():
    with pytest.raises(RuntimeError, match="benchmarks.no_module failed:\n.*No module named"):
        list(child.results_of("no_module", {}))


CHILD = """
import sys, time
from benchmarks._lib import child
settings = child.settings()
print("a library prints this")
for i in range(settings["count"]):
    child.answer({"i": i})
sys.stdout.write('result: {"half')
sys.stdout.flush()
if settings["waits"]:
    time.sleep(60)
"""


@pytest.fixture
def script(monkeypatch, tmp_path):
    """A child process that answers, prints something else, and may wait for a minute."""
    real = child.sys.executable
    (tmp_path / "one.py").write_text(CHILD)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH=. exec {real} {tmp_path}/one.py "$3"\n')
    python.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(python))


def test_what_a_library_prints_is_no_result(script):
    assert list(child.results_of("one", {"count": 2, "waits": False})) == [{"i": 0}, {"i": 1}]


def test_a_child_ends_with_its_time_and_with_its_iterator(script):
    began = time.monotonic()
    results = child.results_of("one", {"count": 1, "waits": True}, limit=3.0)
    assert next(results) == {"i": 0}
    with pytest.raises(TimeoutError, match="benchmarks.one ran for longer than 3 s."):
        next(results)
    results = child.results_of("one", {"count": 1, "waits": True})
    assert next(results) == {"i": 0}
    results.close()
    assert time.monotonic() - began < 30


def test_parts_are_files_of_a_folder(tmp_path):
    def both(run):
        run.report |= {"a": {"figure": 1}, "b": {"figure": 2}}
        run.save()
        assert json.loads((tmp_path / "out" / "b.json").read_text())["figure"] == 2

    one = benchmark(both, keys=("figure",), files=("a", "b", "c"))
    one = dataclasses.replace(one, tables=lambda report: [])
    report = one.main(["--out", str(tmp_path / "out")])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.json", "b.json"]
    again = dataclasses.replace(one, measure=lambda run: None)
    assert again.main(["--out", str(tmp_path / "out")])["b"]["figure"] == report["b"]["figure"]


def recomputed_gpt(scan):
    """The loss of a small GPT whose blocks are all recomputed, and its arguments."""
    config = gpt.Config(layers=3, heads=2, width=16, length=16, scan=scan)
    params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((4, 17), "int32")
    loss = functools.partial(gpt.loss, config=config)
    if scan:
        loop = functools.partial(jrc.recompute_scan, segments=config.layers)
        return functools.partial(loss, loop=loop), (params, batch)
    return jrc.recompute_segments(loss, config.boundaries), (params, batch)


@pytest.mark.exhaustive
def test_flops_of_a_loop_are_counted_alike_in_jrc_and_here():
    products = []
    for scan in (False, True):
        fn, args = recomputed_gpt(scan)
        found = gradient.counts(fn, args, False)
        assert jrc.explain(fn, *args).flops == found["flops"]
        products.append(found["product_flops"])
    # The last product of a block is dead in the recomputed one, in a loop too.
    assert products[0] == products[1]


@pytest.mark.slow
def test_saved_bytes_are_those_of_explain_without_constants():
    fn, args = recomputed_gpt(False)
    assert gradient.saved_bytes(fn, args, False) == jrc.explain(fn, *args).saved_bytes

    def loss(w, x):
        return jnp.sum(jax.nn.relu(jrc.mark(x @ w, "h").reshape(-1)) ** 2)

    args = jnp.ones((4, 4)), jnp.ones((8, 4))
    zeros = [v for v in jrc.explain(loss, *args).saved if v.primitive == "broadcast_in_dim"]
    more = sum(value.bytes for value in zeros)
    assert gradient.saved_bytes(loss, args, False) == jrc.explain(loss, *args).saved_bytes - more
