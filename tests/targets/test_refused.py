"""What compilers say of programs that are too large, and where the number goes."""

import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc.remat._gradient import compiled_memory, loss
from jrc.remat._gradient.refused import bytes_in_refusal

GIB = 2**30
# libtpu 0.0.50, a program of jax.jit(jax.value_and_grad(f)) for v5e and v6e.
EARLY = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (44.12G) exceeds available HBM (15.75G). HLO module: jit_f.\n"
    "See https://openxla.org/xla/errors/error_1000 for more details."
)
# libtpu's other text, after it assigned buffers.
LATE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 18.2G of 15.75G hbm. Exceeded hbm capacity by 2.45G.\n\nTotal hbm usage >= 18.45G:\n"
    "    reserved        256.00M \n    program          16.20G \n    arguments         2.00G \n"
)


@pytest.mark.parametrize(
    "text, size",
    [
        (EARLY, 44.12 * GIB),
        (EARLY.replace("44.12G", "896.25G"), 896.25 * GIB),
        (EARLY.replace("44.12G", "1.02T"), 1.02 * 1024 * GIB),
        (LATE, 18.2 * GIB),
        (LATE.replace("18.2G of", "512.00M of"), 512 * 2**20),
        ("INVALID_ARGUMENT: Topology layout is not divisible", None),
    ],
)
def test_the_peak_is_read(text, size):
    assert bytes_in_refusal(text) == (None if size is None else round(size))


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating.",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 137438953472 bytes.",
    ],
)
def test_a_refusal_without_a_peak_is_told(text):
    with pytest.raises(RuntimeError, match="must say how many bytes a program needs"):
        bytes_in_refusal(text)


def net(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


ARGS = (jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32))


@pytest.fixture
def a_small_device(monkeypatch):
    """A compiler that refuses programs of more than 24 kB, as a TPU's does."""
    real = compiled_memory.compiled_to_look_at

    def compiled(lowered, platform=None):
        found = real(lowered, platform)
        peak = compiled_memory.memory_of(found).peak
        if peak > 24_000:
            text = EARLY.replace("44.12G", f"{peak / 1024:.2f}K")
            raise jax.errors.JaxRuntimeError(text)
        return found

    monkeypatch.setattr(compiled_memory, "compiled_to_look_at", compiled)
    monkeypatch.setattr(loss, "compiled_to_look_at", compiled)


def test_a_plan_has_figures_of_what_was_refused(a_small_device):
    plan = jrc.plan(net, *ARGS, budget=1.0, minimize="flops")
    assert not plan.reruns and plan.verified.peak_bytes > 24_000
    lean = jrc.plan(net, *ARGS, budget=0.0)
    assert lean.reruns and lean.verified.peak_bytes < plan.verified.peak_bytes
    with pytest.raises(jrc.BudgetError, match=r"arguments are \d.*results and gradients \d"):
        jrc.plan(net, *ARGS, budget=8000)


def test_a_report_of_what_was_refused_says_so(a_small_device, tmp_path):
    report = jrc.explain(net, *ARGS)
    assert report.memory.peak > 24_000 and report.memory.arguments == 5120
    assert report.live == () and report.saved_bytes > 0
    assert "the compiler refuses this program" in str(report)
    assert jrc.Report.from_json(report.to_json()) == report
    with pytest.raises(ValueError, match="must have live bytes to be drawn"):
        report.plot(tmp_path / "live.png")


def test_what_is_not_about_memory_is_raised(monkeypatch):
    def compiled(lowered, platform=None):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such custom call")

    monkeypatch.setattr(compiled_memory, "compiled_to_look_at", compiled)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such custom call"):
        jrc.plan(net, *ARGS, budget=1.0)
