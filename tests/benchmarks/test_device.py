"""The run on an accelerator: time, resumption and errors of parts, the allocator's figures."""

import gzip
import json

import jax
import numpy as np
import pytest

import jrc
from benchmarks._lib import child
from benchmarks.device import _offload, _parts, _peaks, _plans, _seconds, _sizes, _tables, kernels
from benchmarks.device import all as device_all
from benchmarks.device._rows import Settings
from tests.zoo import catalogue
from tests.zoo.program import Program

ABOUT = {
    "device": "card", "jax": "1", "jaxlib": "1", "jrc": "1", "date": "2026-11-25T00:00:00+00:00",
}  # fmt: skip
OPTIONS = {"toy": False, "platform": "cpu", "seconds": 100, "plans": None, "kernels": None}


def part(*names, **fields):
    return _parts.Part("device._none", names, names, 1.0, **fields)


@pytest.fixture
def children(monkeypatch):
    """Processes that answer as a function of the row says, and what each was asked for."""
    asked = []

    def use(answers, about=ABOUT):
        def results_of(module, settings, env, limit):
            asked.append((settings["rows"], limit))
            yield {"about": about}
            for name in settings["rows"]:
                yield {"row": name, "found": {"figure": 1}}
                answers(name)
                yield {"row": name, "done": True}

        monkeypatch.setattr(child, "results_of", results_of)
        return asked

    return use


def run(one, found, limit=10.0):
    _parts.run_part(one, found, OPTIONS, limit, lambda: None, lambda text: None)
    return found


def test_a_part_has_all_rows_of_one_process(children):
    asked = children(lambda name: None)
    found = run(part("a", "b"), {"rows": {}})
    assert found == {"rows": {"a": {"figure": 1}, "b": {"figure": 1}}, "about": ABOUT}
    assert [rows for rows, _ in asked] == [["a", "b"]]


def test_rows_that_are_whole_are_not_measured_again(children):
    asked = children(lambda name: None)
    rows = {"a": {"figure": 2}, "b": {"figure": 2, "partial": True}, "c": {"error": "failed"}}
    run(part("a", "b", "c"), {"rows": rows})
    assert [rows for rows, _ in asked] == [["b"]]
    assert rows == {"a": {"figure": 2}, "b": {"figure": 1}, "c": {"error": "failed"}}


def test_a_row_that_ends_its_process_has_the_error_and_the_next_begins_another(children):
    def fail(name):
        if name == "a":
            raise RuntimeError("benchmarks.device._none failed:\n... \nCUDA_ERROR_UNKNOWN")

    asked = children(fail)
    found = run(part("a", "b"), {"rows": {}})
    assert found["rows"] == {"a": {"figure": 1, "error": "CUDA_ERROR_UNKNOWN"}, "b": {"figure": 1}}
    assert [rows for rows, _ in asked] == [["a", "b"], ["b"]]


def test_fresh_rows_are_processes_of_their_own(children):
    asked = children(lambda name: None)
    run(part("a", "b", is_fresh=True), {"rows": {}})
    assert [rows for rows, _ in asked] == [["a"], ["b"]]


def test_rows_of_several_processes_at_once_are_all_there(children):
    def fail(name):
        if name == "b":
            raise RuntimeError("failed")

    asked = children(fail)
    found = run(part(*"abcdefgh", is_fresh=True, at_once=4), {"rows": {}})
    assert sorted(rows for rows, _ in asked) == [[name] for name in "abcdefgh"]
    assert set(found["rows"]) == set("abcdefgh")
    assert [name for name, row in found["rows"].items() if "error" in row] == ["b"]


def test_a_part_whose_time_is_over_stops_and_its_last_row_is_partial(children):
    def late(name):
        if name == "b":
            raise TimeoutError

    children(late)
    found = run(part("a", "b", "c"), {"rows": {}})
    assert found["stopped"] == "its time was over"
    assert found["rows"] == {"a": {"figure": 1}, "b": {"figure": 1, "partial": True}}
    # The next run begins with a row that was not tried.
    assert _parts.missing_rows(part("a", "b", "c"), found, False) == ["c", "b"]


def test_an_interrupt_ends_the_part_and_no_row_has_an_error(children):
    def interrupted(name):
        if name == "b":
            raise RuntimeError("failed:\n  ...\nKeyboardInterrupt")

    asked = children(interrupted)
    found = run(part("a", "b", "c"), {"rows": {}})
    assert found["stopped"] == "interrupted" and len(asked) == 1
    assert found["rows"] == {"a": {"figure": 1}, "b": {"figure": 1, "partial": True}}
    run(part("a", "b", "c"), found)
    assert asked[1][0] == ["b", "c"]


def test_rows_of_two_devices_do_not_mix(children):
    children(lambda name: None, about=ABOUT | {"device": "another card"})
    found = run(part("a", "b"), {"rows": {"a": {"figure": 2}}, "about": ABOUT})
    assert found["stopped"] == "its rows are of card" and "b" not in found["rows"]


def test_a_process_that_does_not_begin_ends_its_part(monkeypatch):
    def results_of(*_):
        raise RuntimeError("failed:\nno device")
        yield

    monkeypatch.setattr(child, "results_of", results_of)
    found = run(part("a", "b"), {"rows": {}})
    assert found == {"rows": {}, "stopped": "no device"}


def test_parts_share_the_time_that_is_left(children, monkeypatch):
    asked = children(lambda name: None)
    parts = {name: part(name) for name in ("one", "two", "three")}
    monkeypatch.setattr(_parts, "PARTS", parts)
    report = {"one": {"rows": {"one": {}}}}
    _parts.run_parts(list(parts), report, OPTIONS, lambda: None, lambda text: None)
    # What is whole takes no time, and what a part leaves of its time is for the next.
    assert [round(limit) for _, limit in asked] == [50, 100]
    assert report["two"]["seconds"] < 10


def test_every_row_is_that_of_a_program_that_needs_no_other_package():
    names = {name: each.rows(False) for name, each in _parts.PARTS.items()}
    assert len(names["peaks"]) == len(names["seconds"]) == 10
    zoo = set(names["peaks"]) & set(catalogue.NAMES)
    packages = {catalogue._PLACES[name][1] for name in zoo}
    assert len(zoo) == 8 and packages <= {"jax", "flax"}
    assert all(set(each.rows(True)) for each in _parts.PARTS.values())


def test_a_folder_is_written_continued_and_shown(children, tmp_path, capsys):
    asked = children(lambda name: None)
    out = tmp_path / "card"
    options = ["--out", str(out), "--only", "speed", "--seconds", "50"]
    device_all.main(options)
    stored = json.loads((out / "speed.json").read_text())
    assert stored["about"] == ABOUT and stored["toy"] is False
    assert list(stored["rows"]) == list(_parts.PARTS["speed"].names)
    device_all.main([*options, "--show"])
    assert len(asked) == 1 and "card, jax 1, jaxlib 1, jrc 1, 2026-11-25" in " ".join(
        capsys.readouterr().out.split()
    )
    with pytest.raises(SystemExit, match="must name a file of toy figures, got .* with full ones"):
        device_all.main([*options, "--toy"])


def test_a_run_without_a_folder_is_refused(capsys):
    with pytest.raises(SystemExit):
        device_all.main([])
    assert "--out must name a folder, got none" in capsys.readouterr().err


def test_the_allocators_figure_is_that_of_the_program():
    before = {"bytes_in_use": 300, "peak_bytes_in_use": 400}
    after = {"bytes_in_use": 350, "peak_bytes_in_use": 1000}
    assert _peaks.allocated(before, after, 250) == {"measured": 950}
    hidden = after | {"peak_bytes_in_use": 400}
    assert _peaks.allocated(before, hidden, 250)["measured"] is None
    assert _peaks.allocated(None, None, 250)["why"] == "memory_stats() is None"


def test_a_program_that_is_refused_memory_does_not_fit(monkeypatch):
    device = jax.devices()[0]
    stats = {"bytes_limit": 8 * 2**20, "bytes_in_use": 2**20, "peak_bytes_in_use": 2**20}
    monkeypatch.setattr(_sizes, "stats_of", lambda device: stats)

    def refuses(text):
        raise jax.errors.JaxRuntimeError(text)

    ran = []
    assert _sizes.fits(lambda: ran.append(1), 2**20, device) is True and ran == [1]
    assert _sizes.fits(lambda: refuses("RESOURCE_EXHAUSTED: out of memory"), 0, device) is False
    assert _sizes.fits(lambda: ran.append(1), 9 * 2**20, device) is None and ran == [1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        _sizes.fits(lambda: refuses("INTERNAL"), 0, device)


@pytest.mark.exhaustive
def test_a_case_is_tried_in_the_memory_that_was_stated(monkeypatch):
    stats = {"bytes_limit": 2**27, "bytes_in_use": 2**20, "peak_bytes_in_use": 2**23}
    monkeypatch.setattr(_sizes, "stats_of", lambda device: stats)
    row = {}
    for found in _sizes.measure(next(iter(_sizes.TOY_CASES)), Settings(toy=True)):
        row |= found
    assert np.all(np.isfinite(row["losses"])) and len(row["seconds"]) == _sizes.STEPS
    assert row["enough"] is row["short"] is row[_sizes.MORE] is True
    (table,) = _tables.sizes({"toy": row})
    assert table.rows[0][-3:] == ("ran", "ran", "ran")


def test_the_share_of_a_sequence_is_that_of_its_tokens():
    assert _sizes.Case("llama_1b", 1, 65_536).part == 1 / 64
    assert _sizes.Case("gpt2_124m", 32, more=8).part == 1 / 4


def test_tables_show_errors_and_what_a_device_does_not_state():
    rows = {
        "a": {"compiled": 110, "measured": 100, "target_peak": 90},
        "b": {"compiled": 2**20, "measured": None, "why": "memory_stats() is None"},
        "c": {"error": "RuntimeError: no"},
    }
    table, errors = _tables.peaks(rows)
    assert [row[0] for row in table.rows] == ["a", "b"] and table.note == "c: RuntimeError: no"
    assert table.rows[0][-2:] == ("+10.0 %", "-10.0 %")
    assert table.rows[1][3:] == ("memory_stats() is None", "-", "-")
    assert errors.rows == [
        ("this compiler", "1", "10.0 %", "10.0 %"), ("target", "1", "10.0 %", "10.0 %")
    ]  # fmt: skip


def test_seconds_are_ranked_where_a_rate_is_known():
    programs = {
        name: {"stated": stated, "seconds": measured, "peak": peak}
        for name, stated, measured, peak in (
            ("baseline", 1.0, 2.0, 2**30), ("every block recomputed", 3.0, 4.0, 2**20),
            ("plan, 0.5", 2.0, 3.0, 2**20), ("plan, 0.75", 1.0, 2.0, 2**29),
        )
    }  # fmt: skip
    table, every = _tables.seconds({"a": {"programs": programs}})
    assert table.rows == [
        ("a", "4", "1 GiB, 2 s", "1 MiB, 2.000 x", "1.500 x", "1.00", "42 %", "-")
    ]  # fmt: skip
    assert every.rows == [("1 programs", "1.00", "42 %")]
    programs["plan, 0.5"]["target_peak"] = 0
    programs["plan, 0.75"]["target_peak"] = 2**29
    assert _tables.seconds({"a": {"programs": programs}})[0].rows[0][-1] == "0 to 1 MiB"
    programs["baseline"]["stated"] = None
    del programs["every block recomputed"]
    (table,) = _tables.seconds({"a": {"programs": programs}})
    assert table.rows[0][3:6] == ("-", "-", "-")


def test_plans_that_a_folder_has_are_not_made_again(tmp_path):
    def loss(w, x):
        for _ in range(4):
            x = np.float32(2) * jax.numpy.tanh(x @ w)
        return jax.numpy.sum(x)

    args = np.ones((8, 8), np.float32), np.ones((64, 8), np.float32)
    program = Program(lambda remat: loss, args, by_hand=False)
    made = _seconds.planned(program, toy=True)
    error = jrc.BudgetError("no plan fits", 1)
    settings = Settings(plans=str(tmp_path))
    path = _plans.path_of(tmp_path, "seconds", "an mlp, 4", False)
    _plans.write_plans(path, {**made, "plan, 0.0": error})
    plans, failed = _plans.plans_of(settings, "seconds", "an mlp, 4", lambda: pytest.fail())
    assert plans == made and failed == {"plan, 0.0": str(error)}
    jax.grad(plans["plan, 0.5"].apply(loss))(*args)
    # Another row has none, and neither has the toy.
    toy = Settings(plans=str(tmp_path), toy=True)
    for each, row in ((settings, "other"), (toy, "an mlp, 4")):
        assert _plans.plans_of(each, "seconds", row, lambda: made) == (made, {})


@pytest.mark.slow
def test_a_program_is_timed_with_the_plans_of_a_folder(tmp_path):
    program = catalogue.make("mirrored_mlp", True)
    made = _seconds.planned(program, toy=True)
    path = _plans.path_of(tmp_path, "seconds", "mirrored_mlp", True)
    _plans.write_plans(path, {**made, "the same": made["plan, 0.5"]})
    settings = Settings(toy=True, plans=str(tmp_path), kernels=str(tmp_path / "kernels"))
    (row,) = _seconds.measure("mirrored_mlp", settings)
    assert set(row["programs"]) == {"baseline", "every block recomputed", "plan, 0.5"}
    assert row["same"] == {"plan, 0.5": "plan, 0.5", "the same": "plan, 0.5"}
    assert all(each["seconds"] > 0 for each in row["programs"].values())
    with gzip.open(tmp_path / "kernels" / "mirrored_mlp.json.gz", "rt") as file:
        kernels = json.load(file)
    assert set(kernels) == set(row["programs"])
    assert all(each["text"].startswith("HloModule") for each in kernels.values())


def test_ways_of_two_libraries_are_one_table():
    way = {"resident": 2**20, "seconds": 0.5, "loss": 10.8, "gradient_norm": 2.5}
    rows = {"GPT": {"ways": {"PyTorch, eager": way, "JAX, baseline": way}, "failed": {"b": "no"}}}
    (table,) = _tables.torch(rows | {"broken": {"error": "no"}})[:1]
    assert [row[0] for row in table.rows] == ["PyTorch, eager", "JAX, baseline"]
    assert table.rows[0][1:] == ("1 MiB", "500 ms", "", "10.800", "2.500") and "no" in table.note
    assert _tables.torch({"broken": {"error": "no"}})[0].note == "no"


def test_kernels_of_a_program_are_compared_by_kind():
    """A product by a library, a fusion that is there twice, and a slice that is copied."""
    text = """HloModule two

%sine (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %s = f32[64,64]{1,0} sine(%p)
}

%slice (q: f32[64,64]) -> f32[1,64] {
  %q = f32[64,64]{1,0} parameter(0)
  ROOT %t = f32[1,64]{1,0} slice(%q), slice={[0:1], [0:64]}
}

ENTRY %main (a: f32[64,64]) -> f32[1,64] {
  %a = f32[64,64]{1,0} parameter(0)
  %loop_sine_fusion = f32[64,64]{1,0} fusion(%a), kind=kLoop, calls=%sine
  %loop_sine_fusion.1 = f32[64,64]{1,0} fusion(%loop_sine_fusion), kind=kLoop, calls=%sine
  %dot.1 = (f32[64,64]{1,0}, s8[4096]{0}) custom-call(%a, %loop_sine_fusion.1), custom_call_target="__cublas$gemm", backend_config={"lhs_contracting_dimensions":["1"]}
  %d = f32[64,64]{1,0} get-tuple-element(%dot.1), index=0
  %start = ((f32[64,64]{1,0}), f32[1,64]{1,0}, u32[]) fusion-start(%d), kind=kLoop, calls=%slice
  ROOT %done = f32[1,64]{1,0} fusion-done(%start)
}
"""  # noqa: E501
    ran = [
        ["stream", "", "loop_sine_fusion", 4, 8e-6], ["stream", "", "sm90_gemm", 2, 20e-6],
        ["stream", "", "memcpy128", 2, 2e-6],
    ]  # fmt: skip
    found = kernels.compared({"text": text, "calls": 2, "kernels": ran}, jrc.target("h100"))
    assert found["measured"] == {"products": 1e-5, "copies": 1e-6, "other kernels": 4e-6}
    assert found["kernels"] == 4
    bandwidth = 0.9 * 3.352e12
    assert found["stated"] == pytest.approx(
        {
            "products": 2 * 4 * 3 * 64 * 64 / bandwidth + 1e-6,
            "copies": 4 * 2 * 64 / bandwidth,
            "other kernels": 2 * 4 * 2 * 64 * 64 / bandwidth,
        }
    )
    assert found["stated_in_all"] == pytest.approx(sum(found["stated"].values()) + 4 * 1.6e-6)
    report = {"target": "h100", "rows": {"two": {"a": found | {"seconds": 2e-5}}}}
    (table,) = kernels.tables(report)
    assert table.rows[0][:5] == ("two", "1", "4", "20 us", "15 us")


def test_measuring_is_compared_with_stating():
    programs = {
        name: {"seconds": seconds}
        for name, seconds in (
            ("baseline", 1.0), ("least stated seconds", 1.5), ("least measured seconds", 1.25)
        )
    }  # fmt: skip
    (table,) = _tables.measured({"a": {"programs": programs, "compilations": 7}})
    assert table.rows == [("a", "1 s", "1.500 x", "1.250 x", "7")]


def test_the_hidden_share_is_of_the_seconds_of_the_copies_alone():
    row = {"bytes": 100, "ways": {"saved": {"seconds": 10.0}, "offloaded": {"seconds": 11.0}}}
    copy = {"rates": {"to host": 50.0, "to device": 50.0}, "copies": True}
    assert _tables.hidden_share(row, copy) == 0.75
    assert _tables.hidden_share(row, copy | {"copies": False}) is None


def test_the_activations_of_the_chain_are_what_is_offloaded():
    assert str(_offload.ways()["offloaded"]).count("layer_") == _offload.DEPTH - 1


@pytest.mark.slow
def test_a_part_runs_in_a_process_of_its_own(tmp_path):
    report = device_all.main(
        ["--toy", "--platform", "cpu", "--out", str(tmp_path), "--only", "selection"]
    )
    rows = report["selection"]["rows"]
    assert set(rows) == set(_parts.PARTS["selection"].toy_names)
    assert all(row["seconds"][1] > 0 for row in rows.values())
    assert report["selection"]["about"]["device"] == jax.devices()[0].device_kind
