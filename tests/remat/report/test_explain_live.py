"""Live bytes against XLA's buffer assignment, and the parser of compiled text."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc.models import gpt, resnet
from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._report.buffer_liveness import donated_results, live_bytes
from tests.compiled_texts import compiled_text

TEXT = compiled_text("loop_and_fusion")


def test_compiled_text_is_parsed():
    module = parse_hlo(TEXT)
    loop = module.entry.by_name["loop"]
    assert (loop.opcode, loop.shape, loop.operands) == ("while", (4, 32, 128), ("in",))
    assert loop.known_trips == 4 and {name for names in loop.called.values() for name in names} == {
        "body", "condition",
    }  # fmt: skip
    both = module.entry.by_name["both"]
    assert list(module.paths(both)) == ["", "", "", "", "jit(f)/jvp(jrc_mark_3_)/add"]
    assert module.computations["body"].by_name["p"].parameter == 0
    assert module.entry.root.name == "out"


def test_bytes_live_until_the_last_reader():
    """A loop updates its state in place; an elementwise operator reuses an operand's buffer.

    Not that of an element of a tuple, though: XLA for GPUs keeps the logits of a head, which cuBLAS
    returns with its workspace, beside their cotangent.
    """
    module = parse_hlo(TEXT)
    names = [instruction.name for instruction in module.entry.instructions]
    levels = dict(zip(names, live_bytes(module), strict=True))
    assert levels == {
        "x": 0, "zero": 0, "y": 32, "buffer": 32 + 128, "in": 160,
        # The loop's body needs 400 bytes more; carry and counter are updated in place.
        "loop": 160 + 400, "c": 32, "over": 32 + 32, "both": 32, "out": 64,
    }  # fmt: skip


@pytest.mark.parametrize("what", ["fusion", "async"])
def test_what_starts_beside_others_makes_a_result_and_no_copy_of_its_operands(what):
    """As GPUs copy a layer out of a stack of ten."""
    module = parse_hlo(f"""
%slice (q: f32[10,64]) -> f32[1,64] {{
  %q = f32[10,64]{{1,0}} parameter(0)
  ROOT %s = f32[1,64]{{1,0}} slice(%q), slice={{[0:1], [0:64]}}
}}

ENTRY %main (x: f32[4]) -> f32[1,64] {{
  %x = f32[4]{{0}} parameter(0)
  %stack = f32[10,64]{{1,0}} custom-call(%x)
  %start = ((f32[10,64]{{1,0}}), f32[1,64]{{1,0}}, u32[]) {what}-start(%stack), calls=%slice
  %done = f32[1,64]{{1,0}} {what}-done(%start)
  ROOT %r = f32[1,64]{{1,0}} custom-call(%done)
}}
""")
    context = 4
    assert live_bytes(module) == [0, 2560, 2560 + 256 + context, 256, 512]


def test_bytes_of_unusual_types():
    text = "ENTRY %e (x: bf16[3]) -> f32[] {\n" + "".join(
        f"  %v{i} = {shape} custom-call()\n"
        for i, shape in enumerate(
            ["bf16[3]{0}", "pred[7]{0}", "s4[5]{0:E(4)}", "f8e4m3fn[2,2]{1,0:T(8,128)}", "token[]",
             "c64[2]{0}", "(f32[2]{0}, (u8[3]{0}, token[]))", "f32[<=4]{0}"]
        )
    ) + "}\n"  # fmt: skip
    shapes = [each.shape for each in parse_hlo(text).entry.instructions]
    assert shapes == [6, 7, 3, 4, 0, 16, (8, (3, 0)), 16]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_the_peak_is_what_xla_assigns(scan, rerun):
    config = gpt.Config(layers=3, heads=2, width=64, length=64, scan=scan)
    params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((2, 65), jnp.int32)
    loss = functools.partial(gpt.loss, config=config)
    if rerun and scan:
        loss = functools.partial(loss, loop=functools.partial(jrc.recompute_scan, segments=3))
    elif rerun:
        loss = jrc.recompute_segments(loss, config.boundaries)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile()
    memory = compiled.memory_analysis()
    assigned = memory.temp_size_in_bytes + memory.output_size_in_bytes
    levels = live_bytes(parse_hlo(compiled.as_text()))
    assert 0.9 < max(levels) / assigned < 1.05
    assert levels[-1] >= memory.output_size_in_bytes * 0.99


def test_donated_results_need_no_memory():
    def step(params, moments, x):
        def loss(ws):
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        gradient = jax.grad(loss)(params)
        moments = [0.9 * m + g for m, g in zip(moments, gradient, strict=True)]
        return [w - 0.1 * m for w, m in zip(params, moments, strict=True)], moments

    w, x = (jax.ShapeDtypeStruct((n, 128), jnp.float32) for n in (128, 256))
    jitted = jax.jit(step, donate_argnums=(0, 1))
    report = jrc.explain(jitted, [w] * 6, [w] * 6, x, argnums=None)
    memory = report.memory
    assigned = memory.temporaries + memory.outputs - memory.aliased
    assert 0.9 < max(point.bytes for point in report.live) / assigned < 1.05
    text = jitted.lower([w] * 6, [w] * 6, x).compile().as_text()
    assert donated_results(text) == {k: k for k in range(12)}


@pytest.mark.slow
def test_the_peak_of_a_convolutional_net():
    config = resnet.Config(depth=14, classes=10, stem="cifar", width=8)
    init = functools.partial(resnet.init, config=config)
    params, state = jax.eval_shape(init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((4, 16, 16, 3), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    loss = functools.partial(resnet.loss, config=config)
    report = jrc.explain(loss, params, state, batch, has_aux=True)
    assigned = report.memory.temporaries + report.memory.outputs
    assert 0.9 < max(point.bytes for point in report.live) / assigned < 1.05
