"""Bytes that kernels read and write, of texts whose bytes are known by hand."""

import jax
import jax.numpy as jnp
import pytest

from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._time.memory_traffic import bytes_moved

ARRAY, ROW = "f32[100,1000]{1,0}", "f32[1,1000]{1,0}"
WHOLE, PART = 4 * 100_000, 4 * 1000


def row_of(name):
    return f"{ROW} dynamic-slice(%{name}, %i, %i), dynamic_slice_sizes={{1,1000}}"


def fused(*lines, operands="%a, %n, %b", result=ARRAY):
    """A fusion of an array, a number and a row."""
    inside = "\n".join(f"  {each}" for each in lines)
    return parse_hlo(f"""
%inside (p: f32[100,1000], i: s32[], r: f32[1,1000]) -> f32[] {{
  %p = {ARRAY} parameter(0)
  %i = s32[] parameter(1)
  %r = {ROW} parameter(2)
{inside}
}}

ENTRY %main (a: f32[100,1000], n: s32[], b: f32[1,1000]) -> f32[] {{
  %a = {ARRAY} parameter(0)
  %n = s32[] parameter(1)
  %b = {ROW} parameter(2)
  ROOT %f = {result} fusion({operands}), kind=kLoop, calls=%inside
}}
""")


def moved(module):
    return bytes_moved(module, module.entry, module.entry.root)


def test_a_row_that_is_written_where_it_lies_is_all_that_is_moved():
    update = f"{ARRAY} dynamic-update-slice(%p, %r, %i, %i)"
    assert moved(fused(f"ROOT %o = {update}")) == 2 * PART + 4
    behind = f"%o = {update}", f"ROOT %v = {ARRAY} bitcast(%o)"
    assert moved(fused(*behind)) == 2 * PART + 4


@pytest.mark.parametrize("opcode", ["negate", "exponential", "copy"])
def test_a_row_that_is_written_into_what_is_computed_is_written_with_it(opcode):
    lines = f"%e = {ARRAY} {opcode}(%p)", f"ROOT %o = {ARRAY} dynamic-update-slice(%e, %r, %i, %i)"
    assert moved(fused(*lines)) == 2 * WHOLE + PART + 4


def test_rows_that_are_written_one_after_the_other_all_count():
    lines = (
        f"%o = {ARRAY} dynamic-update-slice(%p, %r, %i, %i)", f"%s = {ROW} negate(%r)",
        f"ROOT %u = {ARRAY} dynamic-update-slice(%o, %s, %i, %i)",
    )  # fmt: skip
    assert moved(fused(*lines)) == PART + 4 + 2 * PART


def test_a_value_that_is_read_several_times_for_one_slice_is_read_once():
    lines = (
        f"%a2 = {ARRAY} multiply(%p, %p)", f"%a4 = {ARRAY} multiply(%a2, %a2)",
        f"%x = {ARRAY} add(%a4, %p)", f"ROOT %s = {row_of('x')}",
    )  # fmt: skip
    assert moved(fused(*lines, result=ROW)) == 2 * PART + 4


def test_two_slices_are_two():
    lines = (
        f"%s = {row_of('p')}", f"%t = {ROW} slice(%p), slice={{[0:1], [0:1000]}}",
        f"ROOT %o = {ROW} add(%s, %t)",
    )  # fmt: skip
    assert moved(fused(*lines, result=ROW)) == 3 * PART + 4


def test_all_of_a_row_is_read_for_a_row_of_what_repeats_it():
    lines = (
        f"%w = {ARRAY} broadcast(%r), dimensions={{0,1}}", f"%x = {ARRAY} add(%p, %w)",
        f"ROOT %s = {row_of('x')}",
    )  # fmt: skip
    assert moved(fused(*lines, result=ROW)) == 3 * PART + 4


@pytest.mark.parametrize("opcode", ["sort(%p)", "reduce-window(%p, %i)", "dot(%p, %p)"])
def test_what_depends_on_more_than_its_place_is_read_whole(opcode):
    lines = f"%x = {ARRAY} {opcode}", f"ROOT %s = {row_of('x')}"
    assert moved(fused(*lines, result=ROW)) == WHOLE + 4 + PART


def test_of_an_operand_that_is_passed_twice_the_larger_share_counts():
    lines = f"%s = {row_of('p')}", f"ROOT %o = {ROW} add(%s, %r)"
    small = fused(*lines, result=ROW)
    assert moved(small) == 3 * PART + 4
    text = f"""
%inside (p: f32[100,1000], q: f32[100,1000]) -> f32[100,1000] {{
  %p = {ARRAY} parameter(0)
  %q = {ARRAY} parameter(1)
  %s = {ROW} slice(%p), slice={{[0:1], [0:1000]}}
  %w = {ARRAY} broadcast(%s), dimensions={{0,1}}
  ROOT %o = {ARRAY} add(%w, %q)
}}

ENTRY %main (a: f32[100,1000]) -> f32[100,1000] {{
  %a = {ARRAY} parameter(0)
  ROOT %f = {ARRAY} fusion(%a, %a), kind=kLoop, calls=%inside
}}
"""
    assert moved(parse_hlo(text)) == 2 * WHOLE


def test_two_scatters_in_one_are_written_at_their_updates():
    table, rows = "f32[50000,8]{1,0}", "f32[4,8]{1,0}"
    text = f"""
%inside (p: f32[50000,8], q: f32[50000,8], i: s32[4,1], u: f32[4,8], v: f32[4,8]) -> f32[] {{
  %p = {table} parameter(0)
  %q = {table} parameter(1)
  %i = s32[4,1]{{1,0}} parameter(2)
  %u = {rows} parameter(3)
  %v = {rows} parameter(4)
  %s = ({table}, {table}) scatter(%p, %q, %i, %u, %v), to_apply=%add
  %x = {table} get-tuple-element(%s), index=0
  %y = {table} get-tuple-element(%s), index=1
  ROOT %t = ({table}, {table}) tuple(%x, %y)
}}

ENTRY %main (a: f32[50000,8], b: f32[50000,8], i: s32[4,1], u: f32[4,8], v: f32[4,8]) -> f32[] {{
  %a = {table} parameter(0)
  %b = {table} parameter(1)
  %i = s32[4,1]{{1,0}} parameter(2)
  %u = {rows} parameter(3)
  %v = {rows} parameter(4)
  ROOT %f = ({table}, {table}) fusion(%a, %b, %i, %u, %v), kind=kInput, calls=%inside
}}
"""
    # Each update is read and written, and so is what it is added to.
    assert moved(parse_hlo(text)) == 2 * 3 * 4 * 32 + 4 * 4


def test_a_scatter_into_zeros_writes_them():
    lines = (
        "%z = f32[] constant(0)", f"%w = {ARRAY} broadcast(%z), dimensions={{}}",
        f"ROOT %s = {ARRAY} scatter(%w, %i, %r), to_apply=%add",
    )  # fmt: skip
    assert moved(fused(*lines)) == WHOLE + PART + 4


def test_the_bytes_of_a_call_that_is_no_product_are_its_result():
    """ "convert" in a name is no convolution."""
    text = f"""
ENTRY %main (a: f32[100,1000]) -> (f32[100,1000], u8[1000000]) {{
  %a = {ARRAY} parameter(0)
  ROOT %c = ({ARRAY}, u8[1000000]{{0}}) custom-call(%a), custom_call_target="my_convert_to_bytes"
}}
"""
    assert moved(parse_hlo(text)) == 2 * WHOLE + 1_000_000


def test_a_fusion_in_a_fusion_reads_what_it_slices():
    text = f"""
%row (q: f32[100,1000]) -> f32[1,1000] {{
  %q = {ARRAY} parameter(0)
  ROOT %s = {ROW} slice(%q), slice={{[0:1], [0:1000]}}
}}

%inside (p: f32[100,1000]) -> f32[1,1000] {{
  %p = {ARRAY} parameter(0)
  ROOT %g = {ROW} fusion(%p), kind=kLoop, calls=%row
}}

ENTRY %main (a: f32[100,1000]) -> f32[1,1000] {{
  %a = {ARRAY} parameter(0)
  ROOT %f = {ROW} fusion(%a), kind=kLoop, calls=%inside
}}
"""
    assert moved(parse_hlo(text)) == 2 * PART


@pytest.mark.parametrize(
    ("run", "least", "most"),
    [
        (lambda x, r, i: jax.lax.dynamic_update_slice(-x, r[None], (i, 0)), 2 * WHOLE, 3 * WHOLE),
        (lambda x, r, i: jax.lax.dynamic_slice(x * x * x + x, (i, 0), (1, 1000)), PART, 4 * PART),
        (lambda x, r, i: x.at[i].add(r), 2 * PART, 5 * WHOLE),
    ],
)  # fmt: skip
def test_programs_of_this_machine_move_what_their_shapes_say(run, least, most):
    args = jnp.ones((100, 1000)), jnp.ones(1000), jnp.int32(3)
    module = parse_hlo(jax.jit(run).lower(*args).compile().as_text())
    kernels = [each for each in module.entry.instructions if each.opcode == "fusion"]
    found = [bytes_moved(module, module.entry, each) for each in kernels]
    assert kernels and least <= sum(found) <= most
