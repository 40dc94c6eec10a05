"""Seconds of compiled programs, against texts whose time is known by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jrc._jaxpr import flops
from jrc._targets import Chip
from jrc._targets.chips import CHIPS, Figure
from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._planner.costs.compilers import CPU
from jrc.remat._planner.costs.cost_unit import TimeUnit
from jrc.remat._time.cycles import cycles
from jrc.remat._time.exchange import exchange_seconds
from jrc.remat._time.executed import sum_over_executed
from jrc.remat._time.kernel import kernel_of
from jrc.remat._time.rates import rates_of_chip
from jrc.remat._time.roofline import roofline_seconds
from jrc.remat._time.seconds import Device, known_device, seconds_on
from tests.compiled_texts import compiled_text

SOURCE = "a test"
CHIP = Chip(
    "toy", "a toy", "gpu", Figure(1e9, SOURCE), Figure(1e12, SOURCE), Figure(1e9, SOURCE),
    Figure(1e6, SOURCE), Figure(1e6, SOURCE), Figure(1e7, SOURCE),
)  # fmt: skip
CLOCK = Figure(1e6, SOURCE)
RATES = rates_of_chip(CHIP)

CONDITIONAL = compiled_text("conditional")

LOOP = compiled_text("loop_of_ten")


def entry(*lines):
    """A program of one computation."""
    return parse_hlo(
        "ENTRY %main () -> f32[] {\n" + "\n".join(f"  {each}" for each in lines) + "\n}\n"
    )


def no_other(around, each):
    raise AssertionError(f"the compiler states the cycles of {each}")


def test_cycles_of_a_loop_count_as_often_as_it_iterates():
    assert cycles(parse_hlo(LOOP), no_other) == 10 * (30 + 12)
    once = LOOP.replace('"known_trip_count":{"n":"10"}', '"known_trip_count":{"n":"1"}')
    assert cycles(parse_hlo(once), no_other) == 42


def test_cycles_become_seconds_by_the_clock():
    found = seconds_on(parse_hlo(LOOP), known_device("tpu", dataclasses.replace(CHIP, clock=CLOCK)))
    assert found.value == pytest.approx(420e-6) and found.source == "stated by the compiler"


def test_a_kernel_of_unknown_cycles_takes_as_long_as_its_bytes():
    """The compiler for v6e states the largest number for gathers on its SparseCores."""
    text = 'ROOT %b = f32[1000]{0} copy(%a), backend_config={"estimated_cycles":"CYCLES"}'
    device = known_device("tpu", dataclasses.replace(CHIP, clock=CLOCK))
    seconds = [
        seconds_on(entry("%a = f32[1000]{0} parameter(0)", text.replace("CYCLES", each)), device)
        for each in ("1000", str(2**63 - 1))
    ]
    assert seconds[0].value == pytest.approx(1000 / CLOCK.value)
    assert seconds[1].value == pytest.approx(device.rates.seconds_of_bytes(8000))


def test_of_a_device_without_known_rates_there_are_no_seconds():
    unknown = dataclasses.replace(CHIP, memory_bandwidth=Figure(None, SOURCE))
    assert known_device("gpu", unknown) is None and known_device("gpu", None) is None


def test_kernels_of_few_bytes_take_less_time_for_each():
    """They find in a cache what the kernel before them wrote."""
    rates = dataclasses.replace(RATES, bandwidth={2**10: 8e9, 2**20: 1e9})
    found = {size: rates.seconds_of_bytes(size) for size in (0, 100, 2**10, 2**20, 2**24)}
    expected = {0: 0.0, 100: 100 / 8e9, 2**10: 2**10 / 8e9, 2**20: 2**20 / 1e9, 2**24: 2**24 / 1e9}
    assert found == pytest.approx(expected)
    assert rates.seconds_of_bytes(2**15) == pytest.approx(2**15 / 8e9 * 8**0.5)


def test_memory_that_is_new_in_each_run_takes_time():
    rates = dataclasses.replace(RATES, new_memory=1e6)
    there, new = (seconds_on(parse_hlo(LOOP), Device(rates), n).value for n in (0, 3000))
    assert new == pytest.approx(there + 3e-3)


def test_what_a_kernel_slices_or_updates_counts_and_not_the_whole():
    """Of 40,000 bytes a step reads 4,000 and the index, and writes 4,000; twice."""
    step = 2 * (4000 + 4 + 4000)
    found = seconds_on(parse_hlo(LOOP), Device(RATES, CHIP))
    assert found.source == "modelled"
    assert found.value == pytest.approx(10 * (step / RATES.bandwidth + 2 * RATES.launch))


@pytest.mark.parametrize(
    ("m", "k", "n", "seconds"),
    [
        (1000, 1000, 1000, 6e6 / RATES.bandwidth_of_products),
        (8000, 8000, 8000, 2 * 8000**3 / RATES.products),
    ],
)
def test_a_kernel_takes_as_long_as_its_bytes_or_its_products(m, k, n, seconds):
    module = entry(
        f"%a = bf16[{m},{k}]{{1,0}} parameter(0)",
        f"%b = bf16[{k},{n}]{{1,0}} parameter(1)",
        f"ROOT %c = bf16[{m},{n}]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, "
        "rhs_contracting_dims={0}",
    )
    assert roofline_seconds(module, RATES) == pytest.approx(
        seconds + RATES.launch + RATES.latency_of_products
    )


def test_kernels_of_gpus_reach_a_share_of_the_published_rates():
    assert (RATES.products, RATES.bandwidth) == (0.8e12, 0.9e9)
    tpu = rates_of_chip(dataclasses.replace(CHIP, platform="tpu"))
    assert (tpu.products, tpu.bandwidth) == (1e12, 1e9)


def test_kernels_of_products_move_bytes_at_half_the_rate_of_others():
    moved = {
        opcode: roofline_seconds(
            entry(
                "%a = f32[1000,8]{1,0} parameter(0)",
                "%b = f32[8,1000]{1,0} parameter(1)",
                f"ROOT %c = f32[1000,1000]{{1,0}} {text}",
            ),
            RATES,
        )
        for opcode, text in {
            "dot": "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "other": 'custom-call(%a, %b), custom_call_target="other"',
        }.items()
    }
    size = 4 * (1000 * 1000 + 2 * 8 * 1000)
    assert moved["other"] == pytest.approx(size / 0.9e9 + RATES.launch)
    assert moved["dot"] == pytest.approx(size / 0.45e9 + RATES.launch + RATES.latency_of_products)
    assert (RATES.launch, RATES.latency_of_products) == (1.6e-6, 1e-6)


def test_the_workspace_of_a_library_is_no_result():
    """As XLA for GPUs writes a product of 64 x 32 x 16, with 4 MiB to work in."""
    text = (
        "%a = f32[64,32]{1,0} parameter(0)",
        "%b = f32[32,16]{1,0} parameter(1)",
        "ROOT %c = (f32[64,16]{1,0}, s8[4194304]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}',
    )
    module = entry(*text)
    kernel = kernel_of(module, module.entry, module.entry.root)
    assert kernel.products == {"f32": 2 * 64 * 32 * 16}
    assert kernel.bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)
    # Of another call both results count.
    module = entry(*text[:2], text[2].replace("__cublas$lt$matmul", "other"))
    assert kernel_of(module, module.entry, module.entry.root).bytes > 4194304


def fused(opcode, *lines):
    """A program of one fusion of an array of 100 x 1,000 and a number."""
    inside = "\n".join(f"  {each}" for each in lines)
    result = lines[-1].split("= ")[1].split(" ")[0]
    return parse_hlo(
        f"%inside (p: f32[100,1000], i: s32[]) -> f32[] {{\n"
        "  %p = f32[100,1000]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n"
        f"{inside}\n}}\n"
        "ENTRY %main (a: f32[100,1000], n: s32[]) -> f32[] {\n"
        "  %a = f32[100,1000]{1,0} parameter(0)\n  %n = s32[] parameter(1)\n"
        f"  ROOT %f = {result} {opcode}(%a, %n), kind=kLoop, calls=%inside\n}}\n"
    )


ROW = "f32[1,1000]{{1,0}} dynamic-slice(%{}, %i, %i), dynamic_slice_sizes={{1,1000}}"


@pytest.mark.parametrize("opcode", ["fusion", "fusion-start"])
@pytest.mark.parametrize(
    "lines",
    [
        (f"ROOT %r = {ROW.format('p')}",),
        ("%e = f32[100,1000]{1,0} exponential(%p)", f"ROOT %r = {ROW.format('e')}"),
        (
            "%e = f32[100,1000]{1,0} negate(%p)", f"%s = {ROW.format('e')}",
            "ROOT %r = f32[1,1000]{1,0} negate(%s)",
        ),
    ],
)  # fmt: skip
def test_of_what_is_sliced_a_fusion_reads_the_slice(opcode, lines):
    module = fused(opcode, *lines)
    kernel = kernel_of(module, module.entry, module.entry.root)
    assert kernel.bytes == pytest.approx(4 * 1000 + 4 + 4 * 1000)


def test_what_a_fusion_needs_whole_is_read_whole():
    module = fused(
        "fusion", "%e = f32[100,1000]{1,0} negate(%p)", f"%s = {ROW.format('e')}",
        "%b = f32[100,1000]{1,0} broadcast(%s), dimensions={0,1}",
        "ROOT %r = f32[100,1000]{1,0} add(%b, %e)",
    )  # fmt: skip
    kernel = kernel_of(module, module.entry, module.entry.root)
    assert kernel.bytes == 4 * 100_000 + 4 + 4 * 100_000


def test_a_scatter_reads_and_writes_what_it_adds_to():
    """The gradient of a table of which 8 of 50,000 rows were picked."""
    module = entry(
        "%t = f32[50000,64]{1,0} parameter(0)",
        "%i = s32[8,1]{1,0} parameter(1)",
        "%u = f32[8,64]{1,0} parameter(2)",
        "ROOT %s = f32[50000,64]{1,0} scatter(%t, %i, %u), to_apply=%add",
    )
    kernel = kernel_of(module, module.entry, module.entry.root)
    assert kernel.bytes == 4 * (3 * 8 * 64 + 8)


def test_products_of_float32_take_twice_as_long():
    text = (
        "%a = {d}[4096,4096]{{1,0}} parameter(0)",
        "ROOT %c = {d}[4096,4096]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, "
        "rhs_contracting_dims={{0}}",
    )
    rates = dataclasses.replace(RATES, latency_of_products=0.0)
    low, high = (
        roofline_seconds(entry(*(line.format(d=d) for line in text)), rates) - rates.launch
        for d in ("bf16", "f32")
    )
    assert high == pytest.approx(2 * low)


def test_views_and_constants_take_no_time():
    module = entry(
        "%a = f32[1000]{0} parameter(0)",
        "%t = (f32[1000]{0}) tuple(%a)",
        "%g = f32[1000]{0} get-tuple-element(%t), index=0",
        "ROOT %b = f32[10,100]{1,0} bitcast(%g)",
    )
    assert roofline_seconds(module, RATES) == 0


def test_of_a_conditional_the_dearest_branch_counts():
    module = parse_hlo(CONDITIONAL)
    assert cycles(module, no_other) == 70


def test_collectives_and_copies_to_the_host_are_added():
    module = entry(
        "%a = f32[1000]{0} parameter(0)",
        "%sum = f32[1000]{0} all-reduce(%a), replica_groups={{0,1,2,3}}, to_apply=%add",
        "%out = (f32[1000]{0:S(5)}, f32[1000]{0}, u32[]) copy-start(%sum)",
        "ROOT %there = f32[1000]{0:S(5)} copy-done(%out)",
    )
    # A ring sends three quarters of an array twice.
    assert exchange_seconds(module, CHIP) == pytest.approx(6000 / 1e7 + 4000 / 1e6)


def test_a_prefetch_into_fast_memory_is_no_copy_to_the_host():
    module = entry(
        "%a = f32[1000]{0} parameter(0)",
        "%out = (f32[1000]{0:S(1)}, f32[1000]{0}, u32[]{:S(2)}) copy-start(%a)",
        "ROOT %there = f32[1000]{0:S(1)} copy-done(%out)",
    )
    assert exchange_seconds(module, CHIP) == 0


@pytest.mark.parametrize("looped", [False, True])
def test_products_of_a_compiled_program_are_those_of_its_equations(looped):
    """On this CPU: the compiled text of a gradient has the FLOPs of the traced gradient."""
    ws, x = jnp.ones((6, 64, 64)), jnp.ones((32, 64))

    def loss(ws, x):
        step = lambda x, w: (jnp.sin(x @ w), None)  # noqa: E731
        if looped:
            return jnp.sum(jax.lax.scan(step, x, ws)[0])
        for w in ws:
            x, _ = step(x, w)
        return jnp.sum(x)

    gradient = jax.jit(jax.grad(loss))
    module = parse_hlo(gradient.lower(ws, x).compile().as_text())

    def products(around, each):
        kernel = kernel_of(module, around, each)
        return sum(kernel.products.values()) if kernel else 0

    expected = 2 * 32 * 64 * 64 * (6 + 6 + 6 - 1)
    # The first layer's input has no gradient, which a loop computes all the same.
    expected += 2 * 32 * 64 * 64 * looped
    assert sum_over_executed(module, products) == expected
    assert expected <= flops(gradient.trace(ws, x).jaxpr) < 1.2 * expected


def test_convolutions_count_as_the_table_of_primitives_counts_them():
    x, w = jnp.ones((2, 16, 16, 8)), jnp.ones((3, 3, 8, 4))
    fn = jax.jit(
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )
    module = entry(
        "%x = f32[2,16,16,8]{3,2,1,0} parameter(0)",
        "%w = f32[3,3,8,4]{3,2,1,0} parameter(1)",
        "ROOT %y = f32[2,14,14,4]{3,2,1,0} convolution(%x, %w), window={size=3x3}, "
        "dim_labels=b01f_01io->b01f",
    )
    kernel = kernel_of(module, module.entry, module.entry.root)
    assert kernel.products == {"f32": flops(fn.trace(x, w).jaxpr)} and kernel.in_library


def test_convolutions_that_xla_computes_itself_are_slow():
    """In a loop those of gradients, and of images whose channels are not last; compiled here."""
    x, w = jnp.ones((4, 2, 16, 16, 8)), jnp.ones((3, 3, 8, 8))
    numbers = ("NHWC", "HWIO", "NHWC")
    conv = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
        dimension_numbers=numbers,
    )  # fmt: skip

    def loss(w, x):
        return jnp.sum(jax.lax.map(lambda each: jnp.sum(conv(each, w) ** 2), x))

    def unrolled(w, x):
        return sum(jnp.sum(conv(each, w) ** 2) for each in x)

    def found(fn, rates):
        return roofline_seconds(parse_hlo(jax.jit(fn).lower(w, x).compile().as_text()), rates)

    rates = rates_of_chip(dataclasses.replace(CHIP, platform="tpu"))
    rates = dataclasses.replace(rates, bandwidth=1e15, launch=0.0, by_dtype={"f32": 0.5})
    slow = dataclasses.replace(rates, slow_convolutions=rates.convolutions / 100)
    once = 4 * 2 * 2 * 16 * 16 * 8 * 8 * 9 / rates.convolutions
    for fn, of_conv in ((loss, 1), (unrolled, 1), (jax.grad(loss), 101), (jax.grad(unrolled), 2)):
        assert found(fn, slow) == pytest.approx(once * 2 * of_conv, rel=0.1), fn


@pytest.mark.parametrize(
    ("spatial", "groups", "is_slow", "is_slow_in_gradient"),
    [(1, 1, 0, 0), (2, 1, 0, 0), (2, 4, 0, 1), (2, 8, 1, 1), (3, 1, 1, 1)],
)
def test_depthwise_convolutions_and_those_of_three_dimensions_are_slow(
    spatial, groups, is_slow, is_slow_in_gradient
):
    """As compiled programs tell, and as equations do."""
    axes = "DHW"[-spatial:]
    names = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    conv = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1,) * spatial, padding="SAME",
        dimension_numbers=names, feature_group_count=groups,
    )  # fmt: skip
    x, w = jnp.ones((4, *(8,) * spatial, 8)), jnp.ones((*(3,) * spatial, 8 // groups, 8))
    rates = dataclasses.replace(RATES, bandwidth=1e15, functions=1e15, launch=0.0)
    slow = dataclasses.replace(rates, slow_convolutions=rates.convolutions / 1e6)
    forward = lambda w: jnp.sum(conv(x, w) ** 2)  # noqa: E731
    for fn, expected in ((forward, is_slow), (jax.grad(forward), is_slow_in_gradient)):
        module = parse_hlo(jax.jit(fn).lower(w).compile().as_text())
        ratio = roofline_seconds(module, slow) / roofline_seconds(module, rates)
        assert (ratio > 1e3) == bool(expected), (fn, ratio)
        jaxpr = jax.make_jaxpr(fn)(w).jaxpr
        ratio = TimeUnit(slow, CPU).total(jaxpr) / TimeUnit(rates, CPU).total(jaxpr)
        assert (ratio > 1e3) == bool(expected), (fn, ratio)


@pytest.mark.parametrize(
    ("target", "operands", "result", "labels"),
    [
        ("Forward", ("2,8,16,16", "4,8,3,3"), "2,4,14,14", "bf01_oi01->bf01"),
        ("BackwardInput", ("2,4,14,14", "4,8,3,3"), "2,8,16,16", "bf01_oi01->bf01"),
        ("BackwardFilter", ("2,8,16,16", "2,4,14,14"), "4,8,3,3", "bf01_oi01->bf01"),
    ],
)
def test_calls_of_a_library_for_a_convolution_and_its_gradients_cost_the_same(
    target, operands, result, labels
):
    a, b = operands
    module = entry(
        f"%a = f32[{a}]{{3,2,1,0}} parameter(0)",
        f"%b = f32[{b}]{{3,2,1,0}} parameter(1)",
        f"ROOT %y = (f32[{result}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), "
        f'window={{size=3x3}}, dim_labels={labels}, custom_call_target="__cudnn$conv{target}"',
    )
    kernel = kernel_of(module, module.entry, module.entry.root)
    assert kernel.products == {"f32": 2 * 2 * 4 * 14 * 14 * 8 * 9}


@pytest.mark.parametrize("chip", [each for each in CHIPS.values() if each.platform == "tpu"])
def test_clocks_of_tpus_are_plausible(chip):
    assert 0.9e9 < chip.clock.value < 2.5e9
